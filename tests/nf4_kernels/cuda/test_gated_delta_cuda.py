"""The gated delta rule on CUDA against the recurrence in float64, and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from nf4_kernels.cuda import gated_delta
from nf4_kernels.cuda.library import load_error
from tests.nf4_kernels.gated_delta_checks import check_chunks, check_step
from tests.nf4_kernels.gated_delta_layers import BOUNDS, Sequence, indices, is_close, random_layer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(load_error() is not None, reason=str(load_error()))]

# (key heads, value heads, dk, dv): whole heads, smaller ones, and one that the kernel does not take.
HEADS = [(2, 6, 128, 128), (4, 4, 128, 128), (1, 2, 16, 32), (2, 8, 100, 4), (3, 3, 20, 5)]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads", HEADS)
def test_step(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_step(random_layer(heads, slots=6, dtype=dtype, device="cuda"), (4, -1, 0, 5))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("heads", HEADS)
def test_chunks(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    layer = random_layer(heads, slots=7, dtype=dtype, device="cuda")
    check_chunks(layer, (1, 5, 2, 0, 3, 41), (6, 0, -1, 2, 3, 4), (True, False, True, True, True, False))


@pytest.mark.parametrize("dims", [(128, 128), (32, 16)])
def test_states_may_be_bfloat16(dims: tuple[int, int]) -> None:
    layer = random_layer((2, 6, *dims), slots=3, device="cuda", state_dtype=torch.bfloat16)
    check_step(layer, (2, -1, 0))
    check_chunks(layer, (3, 1), (2, 0), (True, True))


def test_rows_that_are_not_aligned_are_copied() -> None:
    layer = random_layer((2, 6, 128, 128), slots=3, device="cuda", dtype=torch.bfloat16)
    inputs = tuple(torch.cat([x[:, :1], x], dim=1)[:, 1:] for x in layer.inputs(1))
    sequence = Sequence.at(layer, 2)
    assert is_close(layer.step(inputs, indices(2, device="cuda")), sequence.advance(*inputs), BOUNDS[torch.bfloat16])


def test_steps_of_many_sequences_are_independent() -> None:
    """A sequence's results are the same bits in any number of sequences and in any order."""
    heads, count = (16, 48, 128, 128), 24
    layer = random_layer(heads, slots=count, device="cuda", dtype=torch.bfloat16)
    other = random_layer(heads, slots=count, device="cuda", dtype=torch.bfloat16)
    inputs = layer.inputs(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    out = layer.step(inputs, torch.arange(count, dtype=torch.int32, device="cuda"))
    shuffled = other.step(tuple(x[order.cuda()] for x in inputs), order.int().cuda())
    assert torch.equal(out[order.cuda()], shuffled)
    assert torch.equal(layer.state, other.state)
    assert torch.equal(layer.conv_state, other.conv_state)


def test_a_graph_replays_steps() -> None:
    layer = random_layer((2, 6, 128, 128), slots=4, device="cuda", dtype=torch.bfloat16)
    sequences = {slot: Sequence.at(layer, slot) for slot in (0, 1, 3)}
    inputs, slots = layer.inputs(2), indices(-1, -1, device="cuda")
    layer.step(inputs, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.step(inputs, slots)
    for seed, rows in enumerate([(3, 0), (0, -1), (1, 3)]):
        for x, new in zip(inputs, layer.inputs(2, seed + 10), strict=True):
            x.copy_(new)
        slots.copy_(torch.tensor(rows, dtype=torch.int32))
        graph.replay()
        for row, slot in enumerate(rows):
            if slot >= 0:
                exact = sequences[slot].advance(*(x[row : row + 1] for x in inputs))
                assert is_close(out[row : row + 1], exact, BOUNDS[torch.bfloat16])
                assert is_close(layer.state[slot], sequences[slot].state, BOUNDS[torch.bfloat16])


def test_what_the_launch_takes() -> None:
    assert _takes((16, 48, 128, 128))
    assert not _takes((3, 3, 20, 5))
    assert not _takes((1, 1, 256, 128))


def _takes(heads: tuple[int, int, int, int]) -> bool:
    layer = random_layer(heads, slots=1, device="cuda")
    inputs = layer.inputs(1)
    p = layer.tensors(inputs)
    return gated_delta.takes(p, 1)
