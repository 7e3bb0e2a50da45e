"""Decoding in columns: whatever happens, it is what chunks give, for many sequences with all sorts of options."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nf4_kernels.timing import KernelTimes
from server.engine.outputs import OutputBuilder
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.runtime.step_input import StepInput, step_input
from server.engine.scheduling import running
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.prompt_images import PromptImage, PromptImages
from server.engine.scheduling.running import COLUMNS_FROM
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.sequence import LoadedAdapter, Phase, Sequence
from server.engine.scheduling.step import Step
from tests.engine.factories import SchedulerDriver, make_request, make_sequence

BLOCK_SIZE = 4
SEQUENCES = 3 * COLUMNS_FROM


class Grammar:
    """A constraint that notes what it is given, and is complete after nine tokens."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    @property
    def done(self) -> bool:
        return len(self.taken) == 9

    def accept(self, token: int) -> None:
        self.taken.append(token)


def sampled(sequence: Sequence) -> int:
    """A token that depends on the sequence and its place, among them some that are stop tokens."""
    return zlib.crc32(f"{sequence.request_id} {len(sequence.tokens)}".encode()) % 200


def requests(rng: random.Random, plain: bool) -> Iterator[Sequence]:
    """Sequences of all kinds; plain: of those that want tokens alone."""
    for index in range(90):
        options: dict[str, Any] = {"max_tokens": rng.randrange(1, 70), "stop_token_ids": (0,) if index % 3 else (7, 8)}
        if index % 5 == 0:
            options["min_tokens"] = rng.randrange(8)
        if not plain and index % 11 == 4:
            options["logprobs"] = 1
        adapter = LoadedAdapter(index % 4, b"own") if index % 13 == 5 else None
        request = make_request([5] * rng.choice((1, 3, 8, 8, 30)), str(index), **options)
        sequence = Sequence(request, index, frozenset({1}), adapter)
        if not plain and index % 7 == 3:
            sequence.bind(Grammar())  # type: ignore[arg-type]
        yield sequence


def history(
    columns: bool, blocks: int, seed: int, plain: bool, async_scheduling: bool, patch: pytest.MonkeyPatch
) -> tuple[list[Any], list[Any]]:
    """Results of steps and ends of sequences, with new ones and aborts now and then."""
    patch.setattr(running, "COLUMNS_FROM", 8 if columns else 10**6)
    rng = random.Random(seed)
    manager = BlockManager(blocks, BLOCK_SIZE)
    scheduler = Scheduler(manager, SEQUENCES, 64, 80, prefix_caching=seed % 2 == 0)
    driver = SchedulerDriver(scheduler, sampled, async_scheduling)
    waiting, sequences, steps = list(requests(rng, plain)), list[Sequence](), list[Any]()
    in_columns = 0

    def note(step: Step) -> None:
        nonlocal in_columns
        if step.decoding is not None:
            in_columns += 1
            check_columns(step)
        chunks = [(c.sequence.request_id, c.start, c.length, c.samples) for c in step.chunks]
        steps.append(
            (
                sorted(chunks),
                step.num_tokens,
                step.prefill_tokens,
                step.num_sampled,
                manager.num_used,
                len(manager._by_key),
            )
        )

    while waiting or driver.has_work:
        for _ in range(min(len(waiting), rng.choice((0, 0, 1, 30)))):
            sequences.append(waiting.pop())
            scheduler.add(sequences[-1])
        if sequences and rng.random() < 0.05:
            scheduler.finish(rng.choice(sequences).request_id, rng.choice(("abort", "error")))
        if driver.has_work:
            driver.step(note)
        assert len(scheduler._running) == sum(own.phase is Phase.RUNNING for own in sequences)
    assert manager.num_used == 0
    assert (in_columns > 20) == columns
    grammars = [own.constraint.taken for own in sequences if isinstance(own.constraint, Grammar)]
    ends = [(own.request_id, own.tokens, own.finish_reason, own.stop_token_id) for own in sequences]
    return steps, [ends, grammars, scheduler.num_preemptions, scheduler.prefix_cache.hits]


def check_columns(step: Step) -> None:
    """A step in columns computes what its chunks say."""
    same = Step(step.chunks)
    assert_same(step_input(step), step_input(same))
    for name in ("size", "sequences", "sampled_sequences", "is_decode", "samples_each", "is_constrained", "is_raw"):
        assert getattr(step, name) == getattr(same, name), name


def assert_same(one: StepInput, other: StepInput) -> None:
    for name in ("rows", "starts", "lengths", "wanted"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert (one.ids, one.tables) == (other.ids, other.tables)
    assert list(one.adapters) == list(other.adapters)
    assert (one.offsets is None) == (other.offsets is None)
    if one.offsets is not None:
        assert np.array_equal(one.offsets, other.offsets)
    assert (one.images is None) == (other.images is None)
    if one.images is not None:
        assert np.array_equal(one.images.rows, other.images.rows)


# With few blocks sequences are preempted, and sequences of a step that is under way are among them.
@pytest.mark.parametrize("blocks", [180, 2000])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_columns_change_nothing(
    blocks: int, async_scheduling: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = seed % 3 == 0
    expected = history(False, blocks, seed, plain, async_scheduling, monkeypatch)
    assert history(True, blocks, seed, plain, async_scheduling, monkeypatch) == expected
    assert (expected[1][2] > 0) == (blocks == 180)


@pytest.mark.parametrize("late", ["nothing", "words", "an image"])
def test_images_in_front_of_what_decodes(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their offsets of positions; and a prompt beside it, with an image of its own or without."""
    monkeypatch.setattr(running, "COLUMNS_FROM", 4)
    positions = np.array([[0, 1, 2, 2, 5, 6]] * 3)
    scheduler = Scheduler(BlockManager(400, BLOCK_SIZE), SEQUENCES, 200, 80)

    def add(index: int, with_image: bool) -> None:
        sequence = make_sequence(6, request_id=str(index), max_tokens=9)
        if with_image:
            sequence.images = PromptImages([PromptImage(b"a", np.array([2, 3]), "file")], positions)
        scheduler.add(sequence)

    for index in range(5):
        add(index, index % 2 == 1)
    for number in range(3):
        if number == 2 and late != "nothing":
            add(9, late == "an image")
        step = scheduler.schedule()
        assert (step.decoding is not None) == (number > 0)
        if number:
            assert step.decoding is not None
            assert step.decoding.columns.offsets is not None
            assert step.decoding.columns.offsets.tolist() == [0, 1, 0, 1, 0]
        check_columns(step)
        scheduler.advance(step)
        scheduler.resolve(step, [9] * step.num_sampled)


def test_what_requests_are_told_is_the_same() -> None:
    """Of a step in columns and of its chunks: tokens, ends, and times, for which the clocks are the same."""
    told = []
    for columns in (False, True):
        scheduler = Scheduler(BlockManager(400, BLOCK_SIZE), SEQUENCES, 200, 80)
        kernels = [KernelTimes()]
        builder = OutputBuilder(lambda now=kernels: now[-1])
        sequences = [make_sequence(3, request_id=str(i), max_tokens=3 + i % 2) for i in range(COLUMNS_FROM)]
        for sequence in sequences:
            scheduler.add(sequence)
            builder.open(sequence.request_id)
        outputs = []
        for number in range(5):
            if number == 2:
                scheduler.add(late := make_sequence(5, request_id="late"))
                builder.open(late.request_id)
            step = scheduler.schedule()
            assert (step.decoding is not None) == (1 <= number <= 2)
            builder.step_clock.start()
            scheduler.advance(step)
            kernels.append(KernelTimes(number + 1.0, 10.0 * (number + 1)))
            builder.step_clock.stop()
            results = [Sampled(sampled(sequence)) for sequence in step.sampled_sequences]
            scheduler.resolve(step, [result.token for result in results])
            outputs += builder.tell(step if columns else Step(step.chunks), results, {})
        times = [(o.timings.dequant_prefill, o.timings.dequant_decode, o.timings.linear_decode) for o in outputs]
        told.append([(o.request_id, o.new_token_ids, o.finish_reason, o.num_cached_tokens) for o in outputs] + times)
    assert told[0] == told[1]
