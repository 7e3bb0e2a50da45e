"""Mamba2 (SSD) with its causal convolution and gated norm, as in Granite 4, Nemotron-H, Falcon-H1, Bamba and Zamba2.

run() advances the sequences of a step. A layer has H heads of P, G groups of N state columns, and C = H P + 2 G N channels
that are convolved by K taps:

* z [T, H P], the gate; xbc [T, C]: x of all heads, then B and C of all groups; dt [T, H]. One dtype, float32, bfloat16 or
  float16. Rows may be views of a joined GEMM's; a row is contiguous.
* conv_weight [C, K], conv_bias [C] or None, a_log, d and dt_bias [H], norm_weight [H P] or None, all in float32 and
  contiguous.
* conv_state [slots, C, K - 1] in xbc's dtype, the latest inputs of the convolution, the oldest first; state [slots, H, N, P]
  in float32. A slot is contiguous. Both are updated in place.
* sequences: their slots, of which -1 is padding: nothing is written, its results are zeros. No slot comes twice. With
  query_start_loc, sequence i has the rows query_start_loc[i] ... query_start_loc[i + 1] - 1, or none, and has_state says
  whether its slot holds a state, else it begins with zeros. Without, each has one row. Rows of no sequence give zeros.

For each token: xbc is convolved, the bias is added, SiLU follows, and the result is rounded to xbc's dtype. rate is
softplus(dt + dt_bias) within dt_limit. A head's state S is multiplied by exp(-exp(a_log) rate), B^T (rate x) is added, and
y = C S + d x, where B and C are those of the head's group; a group serves H / G heads that follow one another. The result
[T, H P] is norm(y silu(z)), or norm(y) silu(z) with norm_before_gate, or y silu(z) without norm_weight. The norm divides
each of norm_groups parts by sqrt(mean of squares + eps) and multiplies by norm_weight. The result is rounded once; all else
is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nf4_kernels import mamba2_torch
from nf4_kernels.cpu import mamba2 as cpu_mamba2
from nf4_kernels.gated_delta_params import Sequences, check_sequences, check_tensors
from nf4_kernels.mamba2_params import Mamba2
from nf4_kernels.params import DTYPES


def run(p: Mamba2, sequences: Sequences) -> Tensor:
    """The results [T, H P]; states are updated. ValueError, by name, for what does not fit together."""
    _check(p)
    check_sequences(sequences, p.xbc.shape[0])
    if not cpu_mamba2.takes(p):
        return mamba2_torch.run(p, sequences)
    starts = sequences.query_start_loc
    # Chunks need not cover all rows.
    out = p.z.new_empty(p.z.shape) if starts is None else p.z.new_zeros(p.z.shape)
    cpu_mamba2.run(p, sequences, out)
    return out


def _check(p: Mamba2) -> None:
    if p.state.dim() != 4 or p.conv_state.dim() != 3 or p.conv_weight.dim() != 2:
        raise ValueError(
            "state must be [slots, H, N, P], conv_state [slots, C, K - 1], conv_weight [C, K],"
            f" got {list(p.state.shape)}, {list(p.conv_state.shape)}, {list(p.conv_weight.shape)}"
        )
    for name, count, total in (("groups", p.groups, p.heads), ("norm_groups", p.norm_groups, p.width)):
        if count < 1 or total % count:
            raise ValueError(f"{name} is {count}, which does not divide {total}")
    tokens, (channels, taps) = p.xbc.shape[0], p.conv_weight.shape
    dtype, parameters = p.xbc.dtype, (torch.float32,)
    expected = (
        ("xbc", (tokens, p.width + 2 * p.groups * p.state_dim), tuple(DTYPES)),
        ("z", (tokens, p.width), (dtype,)),
        ("dt", (tokens, p.heads), (dtype,)),
        ("conv_weight", (p.xbc.shape[1], taps), parameters),
        ("conv_bias", (channels,), parameters),
        ("a_log", (p.heads,), parameters),
        ("d", (p.heads,), parameters),
        ("dt_bias", (p.heads,), parameters),
        ("norm_weight", (p.width,), parameters),
        ("conv_state", (p.state.shape[0], channels, taps - 1), (dtype,)),
        ("state", tuple(p.state.shape), parameters),
    )
    check_tensors(p, expected)
    for name, _, allowed in expected:
        tensor: Tensor | None = getattr(p, name)
        if allowed is parameters and name != "state" and tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")
