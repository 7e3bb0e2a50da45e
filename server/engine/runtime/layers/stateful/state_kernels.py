"""Launches, and parts of launches, for several kinds of state: causal convolution, states into and out of their slots."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from server.engine.runtime.layers.stateful.pieces import Piece

_STATE_BLOCK = 4096
_CHANNELS = 256


def shift(x: torch.Tensor, conv_state: torch.Tensor, piece: Piece, factor: int = 0) -> None:
    """Move the latest inputs of each sequence of a piece, of x [T, C], into its slot of conv_state [slots, C, K - 1].

    factor: if not 0, inputs are x[:, :C] times the columns of x that many further right, rounded.
    """
    _, channels, kept = conv_state.shape
    _shift[(len(piece.slots), triton.cdiv(channels, _CHANNELS))](
        *(x, conv_state, piece.bounds, piece.slots, piece.has_state),
        *(x.stride(0), conv_state.stride(0), channels, kept + 1, _CHANNELS, factor),
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


def _move_states(pool: torch.Tensor, piece: Piece, states: torch.Tensor, stores: bool) -> None:
    elements = states[0].numel()
    _move[(len(piece.slots), triton.cdiv(elements, _STATE_BLOCK))](
        *(pool, states, piece.slots, piece.has_state, pool.stride(0), elements, stores, _STATE_BLOCK),
        num_warps=8,
    )


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """Softplus of x in float32, rounded as torch rounds it."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit  # type: ignore[untyped-decorator]
def taps_of(  # type: ignore[no-untyped-def]
    x,
    conv_weight,
    conv_state,
    first,
    token,
    inside,
    slot,
    continues,
    channel,
    known,
    x_stride,
    slot_stride,
    taps: tl.constexpr,
    factor: tl.constexpr,
):
    """float32 [tokens, channels]: the convolution at some tokens of the sequence whose first row of x is `first`.

    inside and known: which of the tokens and of the channels there are. continues: whether the slot's inputs come before.
    factor: of shift().
    """
    total = tl.zeros((token.shape[0], channel.shape[0]), tl.float32)
    for tap in tl.static_range(taps):
        source = token - (taps - 1) + tap
        weight = tl.load(conv_weight + channel * taps + tap, mask=known, other=0.0).to(tl.float32)
        new = _inputs(
            x + (first + source)[:, None] * x_stride + channel[None, :],
            (inside & (source >= 0))[:, None] & known[None, :],
            factor,
        )
        total += new.to(tl.float32) * weight[None, :]
    # Only the first tokens of a sequence reach back to the slot, and other blocks need no loads for it.
    if continues & (tl.min(token, 0) < taps - 1):
        for tap in tl.static_range(taps - 1):
            source = token - (taps - 1) + tap
            weight = tl.load(conv_weight + channel * taps + tap, mask=known, other=0.0).to(tl.float32)
            old = tl.load(
                conv_state + slot * slot_stride + channel[None, :] * (taps - 1) + (taps - 1 + source)[:, None],
                mask=(inside & (source < 0))[:, None] & known[None, :],
                other=0.0,
            )
            total += old.to(tl.float32) * weight[None, :]
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(place, mask, factor: tl.constexpr):  # type: ignore[no-untyped-def]
    found = tl.load(place, mask=mask, other=0.0)
    if factor != 0:
        found = (found.to(tl.float32) * tl.load(place + factor, mask=mask, other=0.0).to(tl.float32)).to(found.dtype)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def shift_one(  # type: ignore[no-untyped-def]
    x, conv_state, row, slot, continues, channel, known, x_stride, slot_stride, taps: tl.constexpr, factor: tl.constexpr
):
    """Move the inputs of a sequence of one token, row of x, into its slot, after the same program has called taps_of()."""
    # Other threads may have read the slot's inputs.
    tl.debug_barrier()
    state, inside = conv_state + slot * slot_stride + channel * (taps - 1), known & (slot >= 0)
    for place in tl.static_range(taps - 2):
        old = tl.load(state + place + 1, mask=inside & continues, other=0.0)
        tl.store(state + place, old, mask=inside)
    tl.store(state + taps - 2, _inputs(x + row * x_stride + channel, inside, factor), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _shift(  # type: ignore[no-untyped-def]
    x,
    conv_state,
    bounds,
    slots,
    has_state,
    x_stride,
    slot_stride,
    channels,
    taps: tl.constexpr,
    block: tl.constexpr,
    factor: tl.constexpr,
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
        new = _inputs(x + (first + source) * x_stride + channel, inside & (source >= 0), factor)
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
