"""Who is in a step: batching, chunks, admission, preemption, abort, and the invariants under any history."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.runtime.attention.kernels.device_tables import DeviceTables
from server.engine.runtime.batch import Spans
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.sequence import PLACEHOLDER, Phase, Sequence
from server.engine.scheduling.step import Step
from tests.engine.factories import SchedulerDriver, make_sequence


def make_scheduler(
    num_blocks: int = 64, block_size: int = 4, seqs: int = 8, budget: int = 32, length: int = 64
) -> tuple[Scheduler, BlockManager]:
    blocks = BlockManager(num_blocks, block_size)
    return Scheduler(blocks, seqs, budget, length), blocks


def run_step(scheduler: Scheduler) -> Step:
    return SchedulerDriver(scheduler).step()


def shape(step: Step) -> list[tuple[str, int, int]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.length) for chunk in step.chunks]


def test_a_prompt_within_the_budget_is_prefilled_at_once_then_decodes() -> None:
    scheduler, blocks = make_scheduler()
    scheduler.add(make_sequence(10, request_id="a", max_tokens=3))
    assert shape(run_step(scheduler)) == [("a", 0, 10)]
    assert shape(run_step(scheduler)) == [("a", 10, 1)]
    assert shape(run_step(scheduler)) == [("a", 11, 1)]
    assert not scheduler.has_work
    assert blocks.num_used == 0


def test_a_long_prompt_is_prefilled_in_chunks_and_samples_only_at_its_end() -> None:
    scheduler, _ = make_scheduler(budget=8)
    sequence = make_sequence(20, request_id="a")
    scheduler.add(sequence)
    steps = [run_step(scheduler) for _ in range(3)]
    assert [shape(step) for step in steps] == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 4)]]
    assert [len(step.sampled) for step in steps] == [0, 0, 1]
    assert sequence.num_generated == 1


def test_decodes_come_first_and_prefills_share_the_rest() -> None:
    scheduler, _ = make_scheduler(budget=8)
    scheduler.add(make_sequence(4, request_id="a"))
    run_step(scheduler)
    scheduler.add(make_sequence(20, request_id="b"))
    scheduler.add(make_sequence(3, request_id="c"))
    assert shape(run_step(scheduler)) == [("a", 4, 1), ("b", 0, 7)]
    assert shape(run_step(scheduler)) == [("a", 5, 1), ("b", 7, 7)]
    assert shape(run_step(scheduler)) == [("a", 6, 1), ("c", 0, 1), ("b", 14, 6)]
    assert shape(run_step(scheduler)) == [("a", 7, 1), ("b", 20, 1), ("c", 1, 2)]


def test_max_num_seqs_limits_what_runs() -> None:
    scheduler, _ = make_scheduler(seqs=2)
    for name in "abc":
        scheduler.add(make_sequence(4, request_id=name, max_tokens=2))
    assert [name for name, _, _ in shape(run_step(scheduler))] == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    run_step(scheduler)
    assert shape(run_step(scheduler)) == [("c", 0, 4)]


def test_every_running_sequence_decodes_even_with_a_budget_below_max_num_seqs() -> None:
    scheduler, _ = make_scheduler(seqs=8, budget=2)
    for _ in range(8):
        scheduler.add(make_sequence(1))
    run_step(scheduler)
    assert len(run_step(scheduler).chunks) == 8


def test_the_newest_is_preempted_and_comes_back_before_newer_requests() -> None:
    scheduler, blocks = make_scheduler(num_blocks=5, block_size=4, length=20)
    old, new = make_sequence(7, request_id="old", max_tokens=12), make_sequence(4, request_id="new", max_tokens=8)
    scheduler.add(old)
    scheduler.add(new)
    run_step(scheduler)
    late = make_sequence(2, request_id="late", max_tokens=1)
    while not scheduler.num_preemptions:
        step = run_step(scheduler)
    assert step.preempted == [new]
    assert new.phase is Phase.WAITING
    assert new.blocks == []
    tokens = list(new.tokens)
    scheduler.add(late)
    order: list[str] = []
    while scheduler.has_work:
        step = run_step(scheduler)
        order += [name for name, start, _ in shape(step) if start == 0]
    assert order == ["new", "late"]
    assert new.tokens[: len(tokens)] == tokens
    assert new.num_generated == 8
    assert old.num_generated == 12
    assert blocks.num_used == 0


def test_abort_frees_blocks_at_once_in_any_phase() -> None:
    scheduler, blocks = make_scheduler(seqs=1, budget=4)
    running, waiting = make_sequence(12, request_id="running"), make_sequence(3, request_id="waiting")
    scheduler.add(running)
    scheduler.add(waiting)
    run_step(scheduler)
    assert scheduler.finish("waiting", "abort") is waiting
    assert scheduler.finish("running", "abort") is running
    assert scheduler.finish("running", "abort") is None
    assert blocks.num_used == 0
    assert not scheduler.has_work


def test_abort_while_a_step_is_under_way_drops_its_token() -> None:
    scheduler, blocks = make_scheduler()
    driver = SchedulerDriver(scheduler, async_scheduling=True)
    sequence = make_sequence(4, request_id="a")
    scheduler.add(sequence)
    driver.step()
    driver.step()
    # The prompt's token is known, and the placeholder stands for the one that is on the device.
    assert sequence.tokens[4:] == [9, PLACEHOLDER]
    scheduler.finish("a", "abort")
    driver.step()
    assert sequence.tokens[4:] == [9, PLACEHOLDER]
    assert not driver.has_work
    assert blocks.num_used == 0


def test_the_step_after_the_last_token_is_dropped() -> None:
    scheduler, blocks = make_scheduler()
    driver = SchedulerDriver(scheduler, async_scheduling=True)
    sequence = make_sequence(4, request_id="a", max_tokens=8, stop_token_ids=(9,), min_tokens=2)
    scheduler.add(sequence)
    while driver.has_work:
        driver.step()
    # The stop token is read when the step behind it has been launched.
    assert sequence.finish_reason == "stop"
    assert sequence.num_generated == 3
    assert blocks.num_used == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_longest_length_ends_a_sequence(async_scheduling: bool) -> None:
    scheduler, _ = make_scheduler(length=20)
    sequences = [make_sequence(prompt, request_id=f"{prompt}", max_tokens=15) for prompt in (10, 3, 19)]
    for sequence in sequences:
        scheduler.add(sequence)
    driver = SchedulerDriver(scheduler, async_scheduling=async_scheduling)
    while driver.has_work:
        driver.step()
    assert [len(sequence.tokens) for sequence in sequences] == [20, 18, 20]
    assert [sequence.finish_reason for sequence in sequences] == ["length"] * 3


def test_what_can_never_run_is_refused() -> None:
    scheduler, _ = make_scheduler(length=16)
    with pytest.raises(ValueError, match="does not fit"):
        scheduler.add(make_sequence(16))
    with pytest.raises(ValueError, match="does not fit"):
        scheduler.add(make_sequence([]))
    scheduler.add(make_sequence(4, request_id="a"))
    with pytest.raises(ValueError, match="in use"):
        scheduler.add(make_sequence(4, request_id="a"))
    with pytest.raises(ValueError, match="cannot hold"):
        make_scheduler(num_blocks=2, length=64)


def test_resolve_wants_one_token_for_each_sampled_chunk() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_sequence(4))
    step = scheduler.schedule()
    scheduler.advance(step)
    for tokens in ([1, 2], []):
        with pytest.raises(ValueError, match=f"{len(tokens)} tokens for a step that samples 1"):
            scheduler.resolve(step, tokens)


events = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
    st.tuples(st.just("step"), st.just(0), st.just(0)),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(events, max_size=60),
    st.integers(11, 24),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 40),
    st.booleans(),
)
def test_invariants_under_any_history(
    history: list[tuple[str, int, int]],
    num_blocks: int,
    block_size: int,
    seqs: int,
    budget: int,
    async_scheduling: bool,
) -> None:
    length = min(42, num_blocks * block_size)
    scheduler, blocks = make_scheduler(num_blocks, block_size, seqs, budget, length)
    driver = SchedulerDriver(scheduler, async_scheduling=async_scheduling)
    sequences: list[Sequence] = []
    copy = DeviceTables(seqs, blocks.blocks_for(length), 0, torch.device("cpu"))

    def check_step(step: Step) -> None:
        assert step.chunks or async_scheduling
        assert step.num_tokens <= max(budget, seqs)
        assert len({chunk.sequence.request_id for chunk in step.chunks}) == len(step.chunks) <= seqs
        lengths = [chunk.length for chunk in step.chunks]
        assert sorted(lengths, key=lambda n: n > 1) == lengths
        for chunk in step.chunks:
            assert chunk.start == chunk.sequence.num_computed
            assert blocks.missing(chunk.sequence.blocks, chunk.start + chunk.length) == 0
        tables = [chunk.sequence.tables for chunk in step.chunks]
        assert all(table is scheduler._tables for table in tables)
        assert len({chunk.sequence.row for chunk in step.chunks}) == len(step.chunks)
        rows = np.array([chunk.sequence.row for chunk in step.chunks], np.int64)
        lengths = np.array(lengths, np.int64)
        starts = np.array([chunk.start for chunk in step.chunks], np.int64)
        counts = -(-(starts + lengths) // block_size)
        copy.update(Spans(scheduler._tables, rows, starts, lengths, counts, [None] * len(rows)))
        for chunk in step.chunks:
            own = chunk.sequence.blocks
            assert copy.blocks[chunk.sequence.row, : len(own)].tolist() == own

    def check() -> None:
        held = [block for s in sequences for block in s.blocks]
        assert len(held) == len(set(held)) == blocks.num_used
        for s in sequences:
            assert (s.phase is Phase.RUNNING) == bool(s.blocks)
            assert s.num_computed <= len(s.tokens) <= length
            assert PLACEHOLDER not in s.tokens[:-1]
            assert (s.tables is not None) == (s.phase is Phase.RUNNING)
            if s.tables is not None:
                assert s.tables.blocks[s.row, : s.tables.counts[s.row]].tolist() == s.blocks

    for kind, first, second in history:
        if kind == "add" and first < length:
            sequences.append(make_sequence(first, max_tokens=second))
            scheduler.add(sequences[-1])
        elif kind == "abort" and sequences:
            scheduler.finish(sequences[first % len(sequences)].request_id, "abort")
        elif kind == "step" and driver.has_work:
            driver.step(check_step)
        check()
    for _ in range(20_000):
        if not driver.has_work:
            break
        driver.step(check_step)
        check()
    assert blocks.num_used == 0
    assert all(s.phase is Phase.FINISHED for s in sequences)
    for s in sequences:
        if s.finish_reason == "length":
            assert s.num_generated == min(s.sampling.max_tokens, length - s.num_prompt)
