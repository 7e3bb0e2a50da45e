"""Snapshots of states: which are kept, where prompts are cut for them, and what becomes of those that are never written."""

from __future__ import annotations

import random
from typing import cast

import pytest

from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.prompt_images import PromptImages
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.snapshots import NO_SLOT, Snapshots, SnapshotSlots
from server.engine.scheduling.step import Step
from tests.engine.factories import SchedulerDriver, make_sequence

SIZE = 4


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_the_longest_prefix_with_a_snapshot_is_found() -> None:
    snapshots = SnapshotSlots(range(10, 13))
    slots = [snapshots.take() for _ in range(2)]
    snapshots.name(slots[0], b"a")
    snapshots.name(slots[1], b"c")
    assert snapshots.find(keys("a", "b", "c", "d")) == (3, slots[1])
    assert snapshots.find(keys("a", "b")) == (1, slots[0])
    assert snapshots.find(keys("x", "y")) == (0, NO_SLOT)
    snapshots.forget(b"c")
    assert snapshots.find(keys("a", "b", "c", "d")) == (1, slots[0])


def test_the_snapshot_that_was_not_used_for_longest_goes() -> None:
    snapshots = SnapshotSlots(range(2))
    for name in keys("a", "b"):
        snapshots.name(snapshots.take(), name)
    snapshots.find(keys("a"))
    snapshots.name(snapshots.take(), b"c")
    assert [snapshots.find([name])[0] for name in keys("a", "b", "c")] == [1, 0, 1]


def test_slots_that_are_being_written_are_nobody_elses() -> None:
    snapshots = Snapshots(range(2), 8, SIZE)
    sequence, slots = make_sequence(9), snapshots.on_device
    (slot,) = snapshots.take_for(sequence, 8)
    other = slots.take()
    assert {slot, other} == {0, 1}
    assert slots.take() == NO_SLOT
    assert snapshots.take_for(make_sequence(9), 8) == []
    snapshots.drop(sequence)
    assert slots.take() == slot
    slots.name(slot, b"a")
    slots.name(other, b"a")  # another sequence computed the same
    assert len(slots) == 1
    assert slots.take() == other


def test_a_snapshot_in_host_memory_is_found_if_the_device_has_none_as_long() -> None:
    snapshots = Snapshots(range(1), 8, SIZE, range(5, 7))
    slots = []
    for seed in range(3):
        sequence = make_sequence(prompt(9, seed))
        slots.append(snapshots.take_for(sequence, 8))
        sequence.num_computed = 8
        snapshots.note_named(sequence, 0)
    found = [snapshots.find(make_sequence(prompt(9, seed)).block_keys(SIZE, 8)) for seed in range(3)]
    # The device has the last one, the host the last two.
    assert found == [(0, NO_SLOT), (2, slots[1][1]), (2, slots[2][0])]
    assert slots[1][1] in (5, 6)
    for _, slot in found[1:]:
        snapshots.note_hit(slot)
    assert (snapshots.hits, snapshots.host_hits) == (2, 1)
    snapshots.forget(make_sequence(prompt(9, 1)).block_keys(SIZE, 8)[-1])
    assert (len(snapshots.on_device), len(snapshots.on_host)) == (1, 1)


def test_distances_are_multiples_of_blocks() -> None:
    with pytest.raises(ValueError, match="every 10 tokens do not end with blocks of 4"):
        Snapshots(range(2), 10, SIZE)


def make_scheduler(count: int, blocks: int = 200, budget: int = 64) -> tuple[Scheduler, Snapshots, BlockManager]:
    manager, snapshots = BlockManager(blocks, SIZE), Snapshots(range(8, 8 + count), 16, SIZE)
    return Scheduler(manager, 8, budget, 400, True, snapshots=snapshots), snapshots, manager


def chunks_of(scheduler: Scheduler, sequence: Sequence) -> list[tuple[int, int, bool, bool]]:
    """Start and length of each chunk of a sequence that runs alone, and whether it restores and saves a state."""
    found = []
    driver = SchedulerDriver(scheduler)

    def note(step: Step) -> None:
        found.extend((c.start, c.length, c.restored >= 0, bool(c.saved)) for c in step.chunks)

    scheduler.add(sequence)
    while driver.has_work:
        driver.step(note)
    return found


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 99) for _ in range(length)]


def test_chunks_end_where_snapshots_are_taken() -> None:
    scheduler, snapshots, _ = make_scheduler(40)
    # Every 16 tokens, and at 40, the last block that leaves five tokens.
    once = chunks_of(scheduler, make_sequence(prompt(46), max_tokens=1))
    assert once == [(0, 16, False, True), (16, 16, False, True), (32, 8, False, True), (40, 6, False, False)]
    assert chunks_of(scheduler, make_sequence(prompt(46), max_tokens=1)) == [(40, 6, True, False)]
    longer = [*prompt(46), *prompt(9, 1)]
    assert chunks_of(scheduler, make_sequence(longer, max_tokens=1)) == [
        (40, 8, True, True), (48, 7, False, False),
    ]  # fmt: skip
    # The next turn's distances are those from where it begins.
    longest = [*longer, *prompt(40, 2)]
    assert [length for _, length, *_ in chunks_of(scheduler, make_sequence(longest, max_tokens=1))] == [16, 16, 8, 7]
    assert snapshots.hits == 3
    assert scheduler.prefix_cache.hits == 128


def test_one_prompt_takes_a_part_of_the_snapshots_only() -> None:
    scheduler, snapshots, _ = make_scheduler(8)
    chunks = chunks_of(scheduler, make_sequence(prompt(203), max_tokens=1))
    # Two at distances of 112 tokens, and the one at the end; the budget of a step is 64 tokens.
    assert [start + length for start, length, _, saved in chunks if saved] == [112, 196]
    assert len(snapshots.on_device) == 2


def test_a_snapshot_is_taken_where_prompts_branch_off() -> None:
    scheduler, _, _ = make_scheduler(40)
    common = prompt(30)
    assert len(chunks_of(scheduler, make_sequence([*common, *prompt(30, 1)], max_tokens=1))) == 5
    second = chunks_of(scheduler, make_sequence([*common, *prompt(30, 2)], max_tokens=1))
    assert second[:2] == [(16, 12, True, True), (28, 4, False, True)]
    third = chunks_of(scheduler, make_sequence([*common, *prompt(30, 3)], max_tokens=1))
    assert third[0][:3] == (28, 16, True)


def test_what_is_cancelled_preempted_or_fails_gives_its_slot_back() -> None:
    scheduler, snapshots, manager = make_scheduler(1)
    for end in ("abort", "error"):
        sequence = make_sequence(prompt(40))
        scheduler.add(sequence)
        step = scheduler.schedule()
        assert [chunk.saved for chunk in step.chunks] == [[8]]
        scheduler.advance(step)
        scheduler.finish(sequence.request_id, "error" if end == "error" else "abort")
        assert len(snapshots.on_device) == 0
        assert snapshots.find(sequence.block_keys(SIZE, 16)) == (0, NO_SLOT)
    assert snapshots.on_device.take() == 8
    assert manager.num_used == 0


def test_a_block_that_goes_takes_its_snapshot_along() -> None:
    scheduler, snapshots, _ = make_scheduler(10, blocks=100)
    chunks_of(scheduler, make_sequence(prompt(46), max_tokens=1))
    assert len(snapshots.on_device) == 2
    chunks_of(scheduler, make_sequence(prompt(390, 1), max_tokens=1))
    assert snapshots.find(make_sequence(prompt(46)).block_keys(SIZE, 44)) == (0, NO_SLOT)


def test_scored_prompts_take_no_snapshots() -> None:
    scheduler, snapshots, _ = make_scheduler(10)
    chunks = chunks_of(scheduler, make_sequence(prompt(46), max_tokens=1, prompt_logprobs=0))
    assert not any(saved for *_, saved in chunks)
    assert len(snapshots.on_device) == 0


class Waiting:
    """Images of a prompt whose chunk waits for a step of its own."""

    waits = True
    spanning = ()

    def chunk_length(self, start: int, length: int, alone: bool) -> int:
        return 0 if self.waits else length


def test_the_snapshot_of_a_sequence_whose_first_chunk_waits_is_not_written_over() -> None:
    """Nor given away if its key goes."""
    for forgets in (False, True):
        scheduler, snapshots, _ = make_scheduler(1)
        chunks_of(scheduler, make_sequence(prompt(15), max_tokens=1))
        waiting, images = make_sequence(prompt(15), max_tokens=1), Waiting()
        waiting.images = cast(PromptImages, images)
        scheduler.add(waiting)
        scheduler.schedule()
        (slot,) = snapshots.on_device.slots
        assert waiting.snapshot == slot
        if forgets:
            snapshots.forget(waiting.block_keys(SIZE, 8)[-1])
        other = make_sequence(prompt(15, 1))
        assert snapshots.take_for(other, 8) == []
        snapshots.drop(other)
        images.waits = False
        (chunk,) = scheduler.schedule().chunks
        assert (chunk.restored, chunk.start) == (slot, 8)
        assert snapshots.take_for(other, 8) == [slot]
