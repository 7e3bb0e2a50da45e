"""Mamba2 on CUDA: small launches of ours, and fla's chunks on tensor cores between them for long prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from nf4_kernels.mamba2_params import Mamba2
from server.engine.runtime.layers.stateful.delta_chunks import has_fla
from server.engine.runtime.layers.stateful.pieces import CHUNK, MAX_LIVE_BYTES, Piece, results_like
from server.engine.runtime.states.kinds import LONG_CHUNK


def max_tokens(p: Mamba2) -> int:
    """Tokens of which all tensors between xbc and the result fit into MAX_LIVE_BYTES."""
    keys, width = p.heads * p.state_dim, p.xbc.element_size()
    # The convolution; q and k of every head; v, o and what the guards of fla copy; a state for each chunk.
    elements = p.xbc.shape[1] + 4 * keys + 4 * p.width + keys * p.head_dim // CHUNK
    return int(MAX_LIVE_BYTES / (elements * width + (p.width + 3 * p.heads) * 4)) // CHUNK * CHUNK


def step(p: Mamba2, piece: Piece) -> torch.Tensor:
    """The results [T, H P] of nf4_kernels.mamba2 for one token of each sequence; states are updated."""
    out = torch.empty_like(p.z, memory_format=torch.contiguous_format)
    _advance(p, piece, out, 1, False)
    return out


def chunks(p: Mamba2, pieces: Sequence[Piece], longest: int) -> torch.Tensor:
    """The same for chunks of up to `longest` tokens, of which none is padding. Rows behind them are zeros."""
    out = results_like(p.z, pieces, p.z.shape[1])
    is_long = longest >= LONG_CHUNK and has_fla() and p.xbc.dtype in (torch.bfloat16, torch.float16)
    for piece in pieces:
        rows = slice(piece.begin, piece.end)
        part = replace(p, z=p.z[rows], xbc=p.xbc[rows], dt=p.dt[rows])
        _advance(part, piece, out[rows], CHUNK, is_long and p.state_dim <= 256)
    return out


def _advance(p: Mamba2, piece: Piece, out: torch.Tensor, chunk: int, by_fla: bool) -> None:
    from server.engine.runtime.layers.stateful.mamba2_kernels import advance, convolve, normalise

    mixed = convolve(p, piece, chunk)
    normalise(p, _by_fla(p, piece, mixed) if by_fla else advance(p, piece, mixed), out)


def _by_fla(p: Mamba2, piece: Piece, mixed: torch.Tensor) -> torch.Tensor:
    """The outputs [T, H, P] for a piece's convolved rows [T, C], without d x's rounding to mixed's dtype."""
    from server.engine.runtime.layers.stateful.state_kernels import load_states, store_states

    keys = p.groups * p.state_dim
    x, b, c = mixed.split([p.width, keys, keys], -1)
    x = x.unflatten(-1, (p.heads, p.head_dim))
    rate = functional.softplus(p.dt.float() + p.dt_bias).clamp(*p.dt_limit)
    o, states = _rule()(
        q=_of_heads(p, c)[None],
        k=_of_heads(p, b)[None],
        v=(x * rate.unsqueeze(-1)).to(mixed.dtype)[None],
        g=(-torch.exp(p.a_log) * rate)[None],
        scale=1.0,
        initial_state=load_states(p.state, piece),
        output_final_state=True,
        cu_seqlens=piece.bounds,
    )
    store_states(p.state, piece, states)
    found: torch.Tensor = o[0].float() + p.d[:, None] * x
    return found


def _of_heads(p: Mamba2, rows: torch.Tensor) -> torch.Tensor:
    """B or C of the groups [T, G N] for every head, [T, H, N]."""
    grouped = rows.reshape(-1, p.groups, 1, p.state_dim)
    return grouped.expand(-1, -1, p.heads // p.groups, -1).reshape(-1, p.heads, p.state_dim)


@functools.cache
def _rule() -> Callable[..., Any]:
    from fla.ops.simple_gla import chunk_simple_gla

    rule: Callable[..., Any] = chunk_simple_gla
    return rule
