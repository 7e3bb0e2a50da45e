"""The gated delta rule over chunks of prompts on CUDA: fla's kernels on tensor cores between launches of ours.

fla (fla-core, pure Triton) tunes its kernels at their first call, for 48 s on an H100. It takes configurations from files
instead if the environment says where: fla_configs/ has one for each kernel that chunks use.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nf4_kernels.gated_delta_params import GatedDelta
from server.engine.runtime.layers.stateful.pieces import CHUNK, MAX_LIVE_BYTES, Piece, results_like
from server.engine.runtime.states.kinds import LONG_CHUNK

_CONFIGS = Path(__file__).with_name("fla_configs")
# fla reads these when it is imported.
os.environ.setdefault("FLA_CACHE_MODE", "default")
os.environ.setdefault("FLA_CONFIG_DIR", str(_CONFIGS))


def takes(p: GatedDelta, longest: int) -> bool:
    """Whether fla is there and quicker than nf4_kernels.gated_delta."""
    fits = p.qkv.is_cuda and p.qkv.dtype in (torch.bfloat16, torch.float16) and max(p.key_dim, p.value_dim) <= 256
    return fits and longest >= LONG_CHUNK and has_fla()


@functools.cache
def has_fla() -> bool:
    """Whether fla-core is installed."""
    return importlib.util.find_spec("fla") is not None


def max_tokens(p: GatedDelta) -> int:
    """Tokens of which all tensors between qkv and the result fit into MAX_LIVE_BYTES."""
    width = p.qkv.element_size()
    heads, keys = p.num_value_heads, p.num_key_heads * p.key_dim
    # q, k; v, u, the new v, o; w; the chunk's matrix; gates; a state for each chunk.
    elements = 2 * keys + heads * (4 * p.value_dim + p.key_dim + CHUNK + p.key_dim * p.value_dim // CHUNK)
    return int(MAX_LIVE_BYTES / (elements * width + heads * 12)) // CHUNK * CHUNK


def chunks(p: GatedDelta, pieces: Sequence[Piece]) -> torch.Tensor:
    """The results [T, Hv dv] of gated_delta.run(), by fla; states are updated. Rows behind the chunks are zeros."""
    from server.engine.runtime.layers.stateful.delta_kernels import normalise

    out = results_like(p.z, pieces, p.z.shape[1])
    for piece in pieces:
        rows = slice(piece.begin, piece.end)
        part = replace(p, qkv=p.qkv[rows], z=p.z[rows], a=p.a[rows], b=p.b[rows])
        normalise(part, _advance(part, piece), out[rows])
    return out


def _advance(p: GatedDelta, piece: Piece) -> torch.Tensor:
    """The rule's outputs [T, Hv, dv] for a piece's rows."""
    from server.engine.runtime.layers.stateful.delta_kernels import convolve
    from server.engine.runtime.layers.stateful.state_kernels import load_states, shift, store_states

    given = convolve(p, piece)
    shift(p.qkv, p.conv_state, piece)
    o, states = _rule()(
        q=given.q[None],
        k=given.k[None],
        v=given.v[None],
        g=given.log_decay[None],
        beta=given.beta[None],
        scale=p.key_dim**-0.5,
        initial_state=load_states(p.state, piece),
        output_final_state=True,
        cu_seqlens=piece.bounds,
        chunk_indices=piece.chunks,
    )
    store_states(p.state, piece, states)
    found: torch.Tensor = o[0]
    return found


@functools.cache
def _rule() -> Callable[..., Any]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rule: Callable[..., Any] = chunk_gated_delta_rule
    return rule
