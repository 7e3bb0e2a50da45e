"""The gated delta rule with its causal convolution, as in Qwen3.5 and Qwen3-Next, for CPU and CUDA.

run() advances the sequences of a step. A layer has Hk key heads of dk and Hv value heads of dv; C = 2 Hk dk + Hv dv
channels are convolved by K taps.

* qkv [T, C]: all heads of q, then of k, then of v; z [T, Hv dv]; a and b [T, Hv]. One dtype, float32, bfloat16 or float16.
  Rows may be views of a joined GEMM's; a row is contiguous.
* conv_weight [C, K] and norm_weight [dv] in qkv's dtype or float32; a_log and dt_bias [Hv] in float32.
* conv_state [slots, C, K - 1] in qkv's dtype, the latest inputs of the convolution, the oldest first; state [slots, Hv, dk,
  dv] in float32 or bfloat16. A slot is contiguous. Both are updated in place.
* sequences: slots int32 [S], of which -1 is padding: nothing is written, its results are zeros. No slot comes twice. With
  query_start_loc, int32 [S + 1], sequence i has the rows query_start_loc[i] ... query_start_loc[i + 1] - 1, or none, and
  has_state, bool [S], says whether its slot holds a state, else it begins with zeros. Without, each has one row. Rows of no
  sequence give zeros.

For each token of a sequence: qkv is convolved, SiLU follows, and the result is rounded to qkv's dtype. q and k are divided
by sqrt(sum of squares + 1e-6), and q by sqrt(dk). A key head serves Hv / Hk value heads that follow one another. decay is
exp(-exp(a_log) softplus(a + dt_bias)), beta is sigmoid(b). The state S is multiplied by decay, k^T (beta (v - k S)) is
added, and out is q S. The result [T, Hv dv] is norm_weight * (out / sqrt(mean(out^2) + eps)) * silu(z), rounded where
transformers rounds. All else is float32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nf4_kernels import gated_delta_torch
from nf4_kernels.cpu import gated_delta as cpu_gated_delta
from nf4_kernels.cuda import gated_delta as cuda_gated_delta
from nf4_kernels.gated_delta_params import GatedDelta, Sequences, check_sequences, check_tensors
from nf4_kernels.params import DTYPES

STATE_DTYPES = (torch.float32, torch.bfloat16)


def run(p: GatedDelta, sequences: Sequences) -> Tensor:
    """The results [T, Hv dv]; states are updated. ValueError, by name, for what does not fit together."""
    _check(p)
    check_sequences(sequences, p.qkv.shape[0])
    p = replace(p, a_log=p.a_log.contiguous(), dt_bias=p.dt_bias.contiguous())
    # Chunks need not cover all rows.
    out = p.z.new_empty(p.z.shape) if sequences.query_start_loc is None else p.z.new_zeros(p.z.shape)
    if cpu_gated_delta.takes(p):
        cpu_gated_delta.run(p, sequences, out)
    elif cuda_gated_delta.takes(p, len(sequences.slots)):
        cuda_gated_delta.run(p, sequences, out)
    else:
        out = gated_delta_torch.run(p, sequences)
    return out


def _check(p: GatedDelta) -> None:
    """ValueError, by name, for what does not fit together."""
    if p.state.dim() != 4 or p.conv_state.dim() != 3 or p.conv_weight.dim() != 2 or p.num_key_heads < 1:
        raise ValueError(
            "state must be [slots, Hv, dk, dv], conv_state [slots, C, K - 1], conv_weight [C, K], num_key_heads at least 1,"
            f" got {list(p.state.shape)}, {list(p.conv_state.shape)}, {list(p.conv_weight.shape)}, {p.num_key_heads}"
        )
    tokens, heads, taps = p.qkv.shape[0], p.num_value_heads, p.conv_weight.shape[1]
    channels = 2 * p.num_key_heads * p.key_dim + heads * p.value_dim
    if heads % p.num_key_heads:
        raise ValueError(f"{heads} value heads are no multiple of {p.num_key_heads} key heads")
    dtype, parameters = p.qkv.dtype, (torch.float32,)
    check_tensors(
        p,
        (
            ("qkv", (tokens, channels), tuple(DTYPES)),
            ("z", (tokens, heads * p.value_dim), (dtype,)),
            ("a", (tokens, heads), (dtype,)),
            ("b", (tokens, heads), (dtype,)),
            ("conv_weight", (channels, taps), (dtype, torch.float32)),
            ("a_log", (heads,), parameters),
            ("dt_bias", (heads,), parameters),
            ("norm_weight", (p.value_dim,), (dtype, torch.float32)),
            ("conv_state", (p.state.shape[0], channels, taps - 1), (dtype,)),
            ("state", tuple(p.state.shape), STATE_DTYPES),
        ),
    )
