"""Launches around the gated delta rule in chunks of prompts: convolution and gates, states in and out, the gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from nf4_kernels.gated_delta_params import GatedDelta
from server.engine.runtime.layers.stateful.delta_layout import CHUNK, Piece

_STATE_BLOCK = 4096
_CHANNELS = 256
_NORM_ROWS = 16


@dataclass(frozen=True)
class Convolved:
    """The inputs of the rule: q and k [T, Hk, dk], of length 1, v [T, Hv, dv]; float32 log decay and beta [T, Hv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def convolve(p: GatedDelta, piece: Piece) -> Convolved:
    """The inputs of the rule for a piece's rows of p, which begin with the piece. Slots keep their old inputs."""
    tokens, width = piece.end - piece.begin, max(p.key_dim, p.value_dim)
    q = p.qkv.new_empty(tokens, p.num_key_heads, p.key_dim)
    v = p.qkv.new_empty(tokens, p.num_value_heads, p.value_dim)
    log_decay = torch.empty(tokens, p.num_value_heads, dtype=torch.float32, device=q.device)
    out = Convolved(q, torch.empty_like(q), v, log_decay, torch.empty_like(log_decay))
    _convolve[(len(piece.chunks), 2 * p.num_key_heads + p.num_value_heads)](
        *(p.qkv, p.a, p.b, p.conv_weight, p.a_log, p.dt_bias, p.conv_state),
        *(piece.bounds, piece.chunks, piece.slots, piece.has_state),
        *(out.q, out.k, out.v, out.log_decay, out.beta),
        *(p.qkv.stride(0), p.a.stride(0), p.b.stride(0), p.conv_state.stride(0)),
        *(p.num_key_heads, p.num_value_heads, p.key_dim, p.value_dim, p.conv_weight.shape[1]),
        *(CHUNK, triton.next_power_of_2(width)),
        num_warps=4,
    )
    return out


def shift(x: torch.Tensor, conv_state: torch.Tensor, piece: Piece) -> None:
    """Move the latest inputs of each sequence of a piece, of x [T, C], into its slot of conv_state [slots, C, K - 1]."""
    channels = x.shape[1]
    _shift[(len(piece.slots), triton.cdiv(channels, _CHANNELS))](
        *(x, conv_state, piece.bounds, piece.slots, piece.has_state),
        *(x.stride(0), conv_state.stride(0), channels, conv_state.shape[2] + 1, _CHANNELS),
        num_warps=4,
    )


def load_states(pool: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The states float32 [S, heads, ...] of a pool [slots, heads, ...] with which a piece's sequences begin."""
    states = torch.empty(len(piece.slots), *pool.shape[1:], dtype=torch.float32, device=pool.device)
    _move_states(pool, piece, states, False)
    return states


def store_states(pool: torch.Tensor, piece: Piece, states: torch.Tensor) -> None:
    """Write the states of a piece's sequences to their slots."""
    _move_states(pool, piece, states, True)


def normalise(p: GatedDelta, o: torch.Tensor, out: torch.Tensor) -> None:
    """Write norm_weight * norm(o) * silu(z) to out [T, Hv dv], whose rows are contiguous, for o [T, Hv, dv]."""
    rows = o.shape[0] * p.num_value_heads
    _normalise[(triton.cdiv(rows, _NORM_ROWS),)](
        *(o, p.z, p.norm_weight, out, p.z.stride(0), p.eps, rows, p.num_value_heads, p.value_dim),
        *(_NORM_ROWS, triton.next_power_of_2(p.value_dim)),
        num_warps=4,
    )


def _move_states(pool: torch.Tensor, piece: Piece, states: torch.Tensor, stores: bool) -> None:
    elements = states[0].numel()
    _move[(len(piece.slots), triton.cdiv(elements, _STATE_BLOCK))](
        *(pool, states, piece.slots, piece.has_state, pool.stride(0), elements, stores, _STATE_BLOCK),
        num_warps=8,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    qkv,
    a,
    b,
    conv_weight,
    a_log,
    dt_bias,
    conv_state,
    bounds,
    chunks,
    slots,
    has_state,
    q,
    k,
    v,
    log_decay,
    beta,
    qkv_stride,
    a_stride,
    b_stride,
    slot_stride,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    taps: tl.constexpr,
    chunk: tl.constexpr,
    width: tl.constexpr,
):
    """One chunk's tokens of one head of q, k or v; heads of v also have the gates."""
    head = tl.program_id(1)
    sequence = tl.load(chunks + 2 * tl.program_id(0))
    first = tl.load(bounds + sequence)
    tokens = tl.load(bounds + sequence + 1) - first
    # Of the sequence.
    token = tl.load(chunks + 2 * tl.program_id(0) + 1) * chunk + tl.arange(0, chunk)
    inside = token < tokens
    row = first + token
    slot = tl.load(slots + sequence).to(tl.int64)
    continues = (slot >= 0) & (tl.load(has_state + sequence) != 0)
    of_values = head >= 2 * key_heads
    dim = tl.where(of_values, value_dim, key_dim)
    begin = tl.where(of_values, 2 * key_heads * key_dim + (head - 2 * key_heads) * value_dim, head * key_dim)
    column = tl.arange(0, width)
    channel = begin + column
    in_head = column < dim
    total = tl.zeros((chunk, width), tl.float32)
    for tap in tl.static_range(taps):
        source = token - (taps - 1) + tap
        weight = tl.load(conv_weight + channel * taps + tap, mask=in_head, other=0.0).to(tl.float32)
        new = tl.load(
            qkv + (first + source)[:, None] * qkv_stride + channel[None, :],
            mask=(inside & (source >= 0))[:, None] & in_head[None, :],
            other=0.0,
        )
        old = tl.load(
            conv_state + slot * slot_stride + channel[None, :] * (taps - 1) + (taps - 1 + source)[:, None],
            mask=(inside & (source < 0) & continues)[:, None] & in_head[None, :],
            other=0.0,
        )
        total += (new.to(tl.float32) + old.to(tl.float32)) * weight[None, :]
    mixed = (total / (1.0 + tl.exp(-total))).to(q.dtype.element_ty)
    mask = inside[:, None] & in_head[None, :]
    if of_values:
        value_head = head - 2 * key_heads
        tl.store(v + (row[:, None] * value_heads + value_head) * value_dim + column[None, :], mixed, mask=mask)
        rate = tl.load(a + row * a_stride + value_head, mask=inside, other=0.0).to(tl.float32)
        rate += tl.load(dt_bias + value_head)
        # As torch's softplus.
        rate = tl.where(rate > 20.0, rate, tl.log(1.0 + tl.exp(tl.minimum(rate, 20.0))))
        gate = tl.load(b + row * b_stride + value_head, mask=inside, other=0.0).to(tl.float32)
        place = row * value_heads + value_head
        tl.store(log_decay + place, -tl.exp(tl.load(a_log + value_head)) * rate, mask=inside)
        tl.store(beta + place, 1.0 / (1.0 + tl.exp(-gate)), mask=inside)
    else:
        wide = mixed.to(tl.float32)
        unit = (wide * tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)[:, None]).to(q.dtype.element_ty)
        if head < key_heads:
            tl.store(q + (row[:, None] * key_heads + head) * key_dim + column[None, :], unit, mask=mask)
        else:
            tl.store(k + (row[:, None] * key_heads + head - key_heads) * key_dim + column[None, :], unit, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _shift(  # type: ignore[no-untyped-def]
    qkv,
    conv_state,
    bounds,
    slots,
    has_state,
    qkv_stride,
    slot_stride,
    channels,
    taps: tl.constexpr,
    block: tl.constexpr,
):
    """One sequence's latest inputs of some channels."""
    sequence = tl.program_id(0)
    first = tl.load(bounds + sequence)
    tokens = tl.load(bounds + sequence + 1) - first
    slot = tl.load(slots + sequence).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = (channel < channels) & (slot >= 0) & (tokens > 0)
    continues = tl.load(has_state + sequence) != 0
    state = conv_state + slot * slot_stride + channel * (taps - 1)
    # Old inputs move towards the front, so each is read before its place is written.
    for place in tl.static_range(taps - 1):
        source = tokens - (taps - 1) + place
        new = tl.load(qkv + (first + source) * qkv_stride + channel, mask=inside & (source >= 0), other=0.0)
        old = tl.load(state + taps - 1 + source, mask=inside & (source < 0) & continues, other=0.0)
        tl.store(state + place, tl.where(source < 0, old, new), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    pool, states, slots, has_state, slot_stride, elements, stores: tl.constexpr, block: tl.constexpr
):
    """Some elements of one sequence's state, from its slot or to it."""
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < elements
    in_pool = pool + slot * slot_stride + place
    in_states = states + sequence.to(tl.int64) * elements + place
    if stores:
        state = tl.load(in_states, mask=inside, other=0.0)
        tl.store(in_pool, state.to(pool.dtype.element_ty), mask=inside & (slot >= 0))
    else:
        continues = (slot >= 0) & (tl.load(has_state + sequence) != 0)
        tl.store(in_states, tl.load(in_pool, mask=inside & continues, other=0.0).to(tl.float32), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _normalise(  # type: ignore[no-untyped-def]
    o,
    z,
    norm_weight,
    out,
    z_stride,
    eps,
    rows,
    heads: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
):
    """Some heads of some tokens, rounded where transformers rounds."""
    row = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    column = tl.arange(0, width)
    mask = (row < rows)[:, None] & (column < dim)[None, :]
    wide = tl.load(o + row[:, None] * dim + column[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + column, mask=column < dim, other=0.0)
    unit = wide * tl.rsqrt(tl.sum(wide * wide, 1) / dim + eps)[:, None]
    product = weight.to(tl.float32)[None, :] * unit.to(out.dtype.element_ty).to(tl.float32)
    product = product.to(weight.dtype).to(tl.float32)
    gate = tl.load(z + (row // heads)[:, None] * z_stride + (row % heads)[:, None] * dim + column[None, :], mask=mask)
    gate = gate.to(tl.float32)
    result = product * gate / (1.0 + tl.exp(-gate))
    tl.store(out + row[:, None] * dim + column[None, :], result.to(out.dtype.element_ty), mask=mask)
