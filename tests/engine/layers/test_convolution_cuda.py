"""The launches of a short convolution on CUDA, in Triton's interpreter and on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

from server.engine.runtime.layers.stateful import pieces
from server.engine.runtime.layers.stateful.pieces import CHUNK, Piece, Singles
from tests.engine.interpreted import run_interpreted

_LENGTHS, _SLOTS = (1, 70, 2, 0, 64, 130, 5), (6, 0, -1, 2, 3, 4, 7)
_HAS_STATE = (True, False, True, True, True, False, True)


Lengths, Flags = tuple[int, ...], tuple[bool, ...]


def check(
    piece: Piece, lengths: Lengths, slots: Lengths, has_state: Flags, chunk: int, has_bias: bool, dtype: torch.dtype
) -> None:
    """Outputs and slots after one launch, three rows behind the chunks, channels that fill no block."""
    from server.engine.runtime.layers.stateful.convolution_kernels import convolve

    channels, taps, rows, device = 300, 3, sum(lengths), piece.slots.device
    weight, bias = torch.randn(channels, taps, device=device), torch.randn(channels, device=device)
    state = torch.randn(8, channels, taps - 1, device=device).to(dtype)
    columns = torch.randn(rows + 3, 3 * channels, device=device).to(dtype)
    before = state.double()
    out = convolve(columns, weight, bias if has_bias else None, state, piece, chunk)
    assert not out[rows:].any()
    after, (b, c, y) = before.clone(), columns.chunk(3, -1)
    inputs, begin, rounding = (b * y).double(), 0, torch.finfo(dtype).eps
    for length, slot, goes_on in zip(lengths, slots, has_state, strict=True):
        own = slice(begin, begin + length)
        begin += length
        history = before[slot] if slot >= 0 and goes_on else torch.zeros_like(before[0])
        found = torch.cat((history, inputs[own].T), 1)
        if length and slot >= 0:
            after[slot] = found[:, -(taps - 1) :]
        expected = (found.unfold(1, taps, 1) * weight.double()[:, None]).sum(-1).T if length else inputs[own]
        expected = c[own].double() * (expected + bias.double() if has_bias else expected)
        torch.testing.assert_close(out[own].double(), expected, rtol=2 * rounding, atol=8 * rounding)
    assert torch.equal(state.double(), after)


def check_all(dtype: torch.dtype, device: str) -> None:
    slots = torch.tensor(_SLOTS, dtype=torch.int32, device=device)
    has_state = torch.tensor(_HAS_STATE, device=device)
    (piece,) = pieces.cut(1 << 14, _LENGTHS, slots, has_state)
    for has_bias in (False, True):
        check(piece, _LENGTHS, _SLOTS, _HAS_STATE, CHUNK, has_bias, dtype)
        singles = Singles.of(8, torch.device(device)).piece(slots[:5])
        check(singles, (1,) * 5, _SLOTS[:5], (True,) * 5, 1, has_bias, dtype)


def check_interpreted() -> None:
    """On the CPU, which has no compute capability."""
    from server.engine.runtime.layers.stateful import convolution_kernels

    convolution_kernels.capability = lambda _: (8, 0)  # type: ignore[assignment]
    check_all(torch.float32, "cpu")


def test_launches() -> None:
    pytest.importorskip("triton")
    run_interpreted("from tests.engine.layers.test_convolution_cuda import check_interpreted; check_interpreted()")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    check_all(dtype, "cuda")
