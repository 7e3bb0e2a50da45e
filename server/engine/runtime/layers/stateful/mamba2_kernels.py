"""Launches of Mamba2 on CUDA: the convolution, states from token to token, the gated norm."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from nf4_kernels.mamba2_params import Mamba2
from server.engine.runtime.layers.stateful.pieces import Piece
from server.engine.runtime.layers.stateful.state_kernels import shift, shift_one, softplus, taps_of

_CHANNELS = 64
_COLUMNS = 64


def convolve(p: Mamba2, piece: Piece, chunk: int) -> torch.Tensor:
    """SiLU of the convolution of a piece's rows of p.xbc, which begin with the piece, [T, C]. Slots get the latest inputs.

    chunk: tokens that an entry of piece.chunks has.
    """
    tokens, channels = piece.end - piece.begin, p.xbc.shape[1]
    mixed = p.xbc.new_empty(tokens, channels)
    block = _CHANNELS if chunk > 1 else 4 * _CHANNELS
    _convolve[(len(piece.chunks), triton.cdiv(channels, block))](
        *(p.xbc, p.conv_weight, p.conv_weight if p.conv_bias is None else p.conv_bias, p.conv_state, mixed),
        *(piece.bounds, piece.chunks, piece.slots, piece.has_state),
        *(p.xbc.stride(0), p.conv_state.stride(0), channels),
        *(p.conv_bias is not None, p.conv_weight.shape[1], chunk, block),
        num_warps=4,
    )
    if chunk > 1:
        shift(p.xbc, p.conv_state, piece)
    return mixed


def advance(p: Mamba2, piece: Piece, mixed: torch.Tensor) -> torch.Tensor:
    """The outputs float32 [T, H, P] for a piece's convolved rows [T, C], token by token; states are updated."""
    y = torch.empty(mixed.shape[0], p.heads, p.head_dim, dtype=torch.float32, device=mixed.device)
    block = min(_COLUMNS, triton.next_power_of_2(p.head_dim))
    _advance[(len(piece.slots), p.heads, triton.cdiv(p.head_dim, block))](
        *(mixed, p.dt, p.a_log, p.d, p.dt_bias, p.state, y, piece.bounds, piece.slots, piece.has_state),
        *(p.dt.stride(0), p.state.stride(0), *p.dt_limit),
        *(p.heads, p.head_dim, p.state_dim, p.groups, triton.next_power_of_2(p.state_dim), block),
        num_warps=4,
    )
    return y


def normalise(p: Mamba2, y: torch.Tensor, out: torch.Tensor) -> None:
    """Write the gated norm of y [T, H, P] in float32 to out [T, H P], whose rows are contiguous."""
    width = p.width // p.norm_groups
    _normalise[(y.shape[0], p.norm_groups)](
        *(y, p.z, p.a_log if p.norm_weight is None else p.norm_weight, out, p.z.stride(0), p.eps),
        *(p.width, width, p.norm_weight is not None, p.norm_before_gate, triton.next_power_of_2(width)),
        num_warps=8 if width > 2048 else 4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    xbc,
    weight,
    bias,
    conv_state,
    mixed,
    bounds,
    chunks,
    slots,
    has_state,
    xbc_stride,
    slot_stride,
    channels,
    has_bias: tl.constexpr,
    taps: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
):
    """Some channels of one chunk's tokens."""
    sequence = tl.load(chunks + 2 * tl.program_id(0))
    first = tl.load(bounds + sequence)
    tokens = tl.load(bounds + sequence + 1) - first
    # Of the sequence.
    token = tl.load(chunks + 2 * tl.program_id(0) + 1) * chunk + tl.arange(0, chunk)
    inside = token < tokens
    slot = tl.load(slots + sequence).to(tl.int64)
    continues = (slot >= 0) & (tl.load(has_state + sequence) != 0)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    known = channel < channels
    total = taps_of(
        xbc, weight, conv_state, first, token, inside, slot, continues, channel, known, xbc_stride, slot_stride, taps, 0
    )
    if chunk == 1:
        shift_one(xbc, conv_state, first, slot, continues, channel, known, xbc_stride, slot_stride, taps, 0)
    if has_bias:
        total += tl.load(bias + channel, mask=known, other=0.0)[None, :]
    result = (total / (1.0 + tl.exp(-total))).to(mixed.dtype.element_ty)
    tl.store(
        mixed + (first + token)[:, None] * channels + channel[None, :], result, mask=inside[:, None] & known[None, :]
    )


@triton.jit  # type: ignore[untyped-decorator]
def _advance(  # type: ignore[no-untyped-def]
    mixed,
    dt,
    a_log,
    d,
    dt_bias,
    state,
    y,
    bounds,
    slots,
    has_state,
    dt_stride,
    slot_stride,
    dt_min,
    dt_max,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    state_dim: tl.constexpr,
    groups: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Some columns of one head's state over the tokens of one sequence. Padding's outputs are zeros."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(bounds + sequence)
    tokens = tl.load(bounds + sequence + 1) - first
    slot = tl.load(slots + sequence).to(tl.int64)
    continues = (slot >= 0) & (tl.load(has_state + sequence) != 0)
    row = tl.arange(0, rows)
    column = tl.program_id(2) * block + tl.arange(0, block)
    in_rows, in_head = row < state_dim, column < head_dim
    inside = in_rows[:, None] & in_head[None, :]
    at = state + slot * slot_stride + (head * state_dim + row[:, None]) * head_dim + column[None, :]
    held = tl.load(at, mask=inside & continues, other=0.0)
    decay, skip = -tl.exp(tl.load(a_log + head)), tl.load(d + head)
    bias = tl.load(dt_bias + head)
    width = heads * head_dim
    key = width + head // (heads // groups) * state_dim + row
    for token in range(tokens):
        of_token = mixed + (first + token) * (width + 2 * groups * state_dim)
        rate = softplus(tl.load(dt + (first + token) * dt_stride + head).to(tl.float32) + bias)
        rate = tl.minimum(tl.maximum(rate, dt_min), dt_max)
        x = tl.load(of_token + head * head_dim + column, mask=in_head, other=0.0).to(tl.float32)
        b = tl.load(of_token + key, mask=in_rows, other=0.0).to(tl.float32)
        c = tl.load(of_token + key + groups * state_dim, mask=in_rows, other=0.0).to(tl.float32)
        held = held * tl.exp(decay * rate) + b[:, None] * (rate * x)[None, :]
        found = tl.where(slot >= 0, tl.sum(c[:, None] * held, 0) + skip * x, 0.0)
        tl.store(y + (first + token) * width + head * head_dim + column, found, mask=in_head)
    tl.store(at, held, mask=inside & (slot >= 0) & (tokens > 0))


@triton.jit  # type: ignore[untyped-decorator]
def _normalise(  # type: ignore[no-untyped-def]
    y,
    z,
    norm_weight,
    out,
    z_stride,
    eps,
    width,
    part: tl.constexpr,
    has_norm: tl.constexpr,
    norm_before_gate: tl.constexpr,
    block: tl.constexpr,
):
    """One part of a token's gated norm."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, block)
    inside = place < part
    column = tl.program_id(1) * part + place
    wide = tl.load(y + row * width + column, mask=inside, other=0.0)
    gate = tl.load(z + row * z_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if has_norm:
        if not norm_before_gate:
            wide *= gate
        wide *= tl.rsqrt(tl.sum(wide * wide, 0) / part + eps)
        wide *= tl.load(norm_weight + column, mask=inside, other=0.0)
        if norm_before_gate:
            wide *= gate
    else:
        wide *= gate
    tl.store(out + row * width + column, wide.to(out.dtype.element_ty), mask=inside)
