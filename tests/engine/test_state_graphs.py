"""Steps of chunks over states as CUDA graphs have them: the lengths of their sequences are on the device only."""

from __future__ import annotations

import pytest
import torch

from server.engine.runtime.batch import Span, Spans
from server.engine.runtime.layers.stateful import pieces
from server.engine.runtime.states.kinds import LONG_CHUNK, gated_delta, mamba2, short_convolution
from server.engine.runtime.states.pool import PADDING, StateError, StatePool
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.scheduler import Scheduler
from tests.engine.factories import make_sequence
from tests.engine.hybrids import CONFIG, check_steps, prompt_of, runner_of
from tests.engine.models import HYBRIDS

DELTA = gated_delta(16, 4, 2, 4, 4, torch.float32)
MAMBA = mamba2(16, 4, 2, 4, 4, torch.float32)
CONVOLUTION = short_convolution(8, 3, torch.float32)


def pool_of(*kinds: object) -> StatePool:
    return StatePool(kinds, 6, torch.device("cpu"))  # type: ignore[arg-type]


def spans_of(*chunks: tuple[int, int, int]) -> Spans:
    """Of (row, first token, tokens)."""
    return Spans.of([Span(0, start, length, ()) for _, start, length in chunks], [row for row, *_ in chunks])


def test_padding_is_a_sequence_without_a_slot() -> None:
    pool = pool_of(DELTA)
    pool.plan_chunks_graph(spans_of((2, 0, 5), (0, 0, 70)), 128, 4)
    pool.plan_chunks_graph(spans_of((2, 5, 1), (0, 70, 9)), 64, 3)
    pool.begin_chunks_graph(64, 3, is_long=False)
    step = pool.step
    assert step.singles.tolist() == []
    assert step.chunks.tolist() == [2, 0, PADDING, PADDING]
    assert step.query_start_loc.tolist() == [0, 1, 10, 64, 64]
    assert step.has_state.tolist() == [True, True, False, False]
    with pytest.raises(StateError, match="begins at token 5 of a sequence whose state ends at 6"):
        pool.plan_chunks_graph(spans_of((2, 5, 1)), 64, 3)


def test_long_chunks_are_told_apart_where_other_kernels_compute_them() -> None:
    short, long = spans_of((0, 0, 5), (1, 0, LONG_CHUNK - 1)), spans_of((0, 0, 1), (1, 0, LONG_CHUNK))
    for kinds, apart, captures in (
        ([DELTA], True, True),
        ([DELTA, CONVOLUTION], True, True),
        ([MAMBA], True, False),
        ([CONVOLUTION], False, False),
    ):
        pool = pool_of(*kinds)
        assert (pool.is_long(short), pool.is_long(long), pool.captures_long) == (False, apart, captures)
    for is_long, longest in ((False, LONG_CHUNK - 1), (True, 512)):
        pool.begin_chunks_graph(512, 6, is_long)
        assert pool.step.longest == longest


@pytest.mark.parametrize("lengths", [[1, 64, 130, 7], [65], [], [300]])
def test_chunks_of_a_graph_are_those_of_the_host(lengths: list[int]) -> None:
    pool, size = pool_of(DELTA), 384
    spans = spans_of(*((row, 0, length) for row, length in enumerate(lengths)))
    pool.plan_chunks_graph(spans, size, 5)
    pool.begin_chunks_graph(size, 5, is_long=True)
    (piece,) = pieces.pieces_of(pool.step, DELTA, size, 0)
    assert (piece.begin, piece.end) == (0, size)
    padded = [*lengths, size - sum(lengths)]
    flags = torch.zeros(len(padded), dtype=torch.bool)
    (expected,) = pieces.cut(size, padded, torch.arange(len(padded), dtype=torch.int32), flags)
    count = len(expected.chunks)
    assert piece.bounds.dtype is torch.int64
    assert piece.bounds[: len(padded) + 1].tolist() == expected.bounds.tolist()
    assert piece.chunks[:count].tolist() == expected.chunks.tolist()
    # The others lie beyond the end of their sequence.
    for sequence, chunk in piece.chunks[count:].tolist():
        assert chunk * pieces.CHUNK >= piece.bounds[sequence + 1] - piece.bounds[sequence]


@pytest.mark.parametrize("family", HYBRIDS)
def test_steps_with_lengths_on_the_device_give_transformers_logits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(family)
    pool = runner.states
    assert pool is not None

    def begin(spans: Spans, _: int) -> None:
        size = int(spans.lengths.sum())
        pool.plan_chunks_graph(spans, size, 6)
        pool.begin_chunks_graph(size, 6, is_long=False)

    monkeypatch.setattr(pool, "begin", begin)
    scheduler = Scheduler(BlockManager(32, CONFIG.block_size), 5, 16, 128)
    sequences = [make_sequence(prompt_of(n), max_tokens=20) for n in (1, 5, 41, 17, 30, 2, 9)]
    check_steps(family, runner, scheduler, sequences)
