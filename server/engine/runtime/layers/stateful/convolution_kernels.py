"""The launch of a short convolution between two gates on CUDA (LFM2)."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from nf4_kernels.cuda.device import capability
from server.engine.runtime.layers.stateful.pieces import Piece, results_like
from server.engine.runtime.layers.stateful.state_kernels import shift, shift_one, taps_of


def convolve(
    columns: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    piece: Piece,
    chunk: int,
) -> torch.Tensor:
    """c * convolution(b * y) [T, C] for columns [T, 3 C] of b, c and y, in 16 bits; slots get the latest inputs.

    weight float32 [C, K], bias float32 [C], conv_state [slots, C, K - 1]. chunk: tokens that an entry of piece.chunks has,
    1 or CHUNK. Rows behind the piece's chunks are zeros.
    """
    channels, taps = weight.shape
    out = results_like(columns, [piece], channels)
    block = 64 if chunk > 1 else 256
    overlap = capability(columns.device)[0] >= 9
    _convolve[(len(piece.chunks), triton.cdiv(channels, block))](
        *(columns, weight, weight if bias is None else bias, conv_state, out),
        *(piece.bounds, piece.chunks, piece.slots, piece.has_state, columns.stride(0), conv_state.stride(0), channels),
        *(bias is not None, taps, 2 * channels, chunk, block, overlap),
        num_warps=4,
        launch_pdl=overlap,
    )
    if chunk > 1:
        shift(columns, conv_state, piece, 2 * channels)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    columns,
    weight,
    bias,
    conv_state,
    out,
    bounds,
    chunks,
    slots,
    has_state,
    row_stride,
    slot_stride,
    channels,
    has_bias: tl.constexpr,
    taps: tl.constexpr,
    factor: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
):
    """Some channels of one chunk's tokens, rounded where transformers rounds."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
        columns, weight, conv_state, first, token, inside, slot, continues, channel, known, row_stride, slot_stride,
        taps, factor,
    )  # fmt: skip
    if chunk == 1:
        shift_one(columns, conv_state, first, slot, continues, channel, known, row_stride, slot_stride, taps, factor)
    if has_bias:
        total += tl.load(bias + channel, mask=known, other=0.0)[None, :]
    mask, row = inside[:, None] & known[None, :], first + token
    gate = tl.load(columns + row[:, None] * row_stride + channels + channel[None, :], mask=mask, other=0.0)
    result = gate.to(tl.float32) * total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row[:, None] * channels + channel[None, :], result.to(out.dtype.element_ty), mask=mask)
