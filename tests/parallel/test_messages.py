"""Steps as messages: what a worker reads of them is what the engine computes."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import torch

from server.engine.parallel.messages import ComputeStep, StepReader, StepWriter, ToWorker
from server.engine.runtime.attention.kernels.device_tables import DeviceTables
from server.engine.runtime.batch import batch_of
from server.engine.runtime.graphs.launched_step import Launch
from server.engine.runtime.sampling.random_rows import RandomRows
from server.engine.runtime.step_input import step_input
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.prompt_images import PromptImage, PromptImages
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.snapshots import Snapshots
from server.engine.scheduling.step import Step
from tests.engine.factories import SchedulerDriver, make_sequence

BLOCK_SIZE, LONGEST, SEQUENCES = 4, 64, 4


def _through_bytes(message: ComputeStep) -> ComputeStep:
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToWorker)
    assert isinstance(read, ComputeStep)
    return read


def test_a_worker_computes_the_same_batches_with_preemptions_and_shared_prefixes() -> None:
    rng = random.Random(1)
    # So few blocks that sequences are preempted and rows of the tables change hands.
    scheduler = Scheduler(BlockManager(22, BLOCK_SIZE), SEQUENCES, 16, LONGEST, prefix_caching=True)
    writer, reader = StepWriter(), StepReader(SEQUENCES, LONGEST // BLOCK_SIZE)
    common = [rng.randrange(3, 99) for _ in range(12)]
    for index in range(12):
        own = [rng.randrange(3, 99) for _ in range(rng.randrange(1, 20))]
        scored = 0 if index == 5 else None
        scheduler.add(make_sequence((common if index % 2 else []) + own, max_tokens=14, prompt_logprobs=scored))
    steps, bytes_sent = 0, []
    copies = [DeviceTables(SEQUENCES, LONGEST // BLOCK_SIZE, 99, torch.device("cpu")) for _ in range(2)]

    def run(step: Step) -> None:
        nonlocal steps
        if not step.chunks:
            return
        steps += 1
        given = step_input(step)
        message = writer.write(given, None)
        bytes_sent.append(len(message.blocks))
        read, launch = reader.read(_through_bytes(message))
        assert launch is None
        expected, found = batch_of(given, BLOCK_SIZE), batch_of(read, BLOCK_SIZE)
        for name in ("ids", "positions", "slots", "sampled_rows"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert found.num_single == expected.num_single
        for copy, batch in zip(copies, (expected, found), strict=True):
            copy.update(batch.spans)
            for span, row in zip(expected.spans, expected.spans.rows.tolist(), strict=True):
                assert copy.blocks[row, : len(span.blocks)].tolist() == span.blocks.tolist()
        for theirs, ours in zip(found.spans, expected.spans, strict=True):
            assert np.array_equal(theirs.blocks, ours.blocks)
            assert (theirs.row, theirs.start, theirs.length) == (ours.row, ours.start, ours.length)
            # What tells a copy of the tables on a device which entries are new.
        assert np.array_equal(read.tables.holders[read.rows], given.tables.holders[given.rows])

    driver = SchedulerDriver(scheduler, lambda _: rng.randrange(3, 99))
    while driver.has_work:
        driver.step(run)
    assert scheduler.num_preemptions > 0
    # Most steps bring no block or some, never the whole tables again.
    assert steps > 40
    assert sum(bytes_sent) / steps < 3 * 4 * SEQUENCES
    assert 0 in bytes_sent


def test_how_tokens_are_sampled_and_adapters_arrive() -> None:
    scheduler = Scheduler(BlockManager(64, BLOCK_SIZE), SEQUENCES, 16, LONGEST)
    sequences = [make_sequence(3, temperature=0.0), make_sequence(5, temperature=0.7, top_k=3, seed=4)]
    sequences[1].adapter = 2
    for sequence in sequences:
        scheduler.add(sequence)
    step = scheduler.schedule()
    launch = Launch(False, None, RandomRows(step.sequences, 99).table())
    writer, reader = StepWriter(), StepReader(SEQUENCES, LONGEST // BLOCK_SIZE)
    given, read = reader.read(_through_bytes(writer.write(step_input(step), launch)))
    assert given.adapters == [None, 2]
    assert read is not None
    assert (read.follows, read.source) == (False, None)
    expected, table = launch.table, read.table
    assert expected is not None
    assert table is not None
    assert np.array_equal(table, expected)
    assert table[0, :2].tolist() == [1, 0.7]


def test_images_arrive_without_what_only_rank_0_has() -> None:
    scheduler = Scheduler(BlockManager(64, BLOCK_SIZE), SEQUENCES, 32, LONGEST)
    sequences = [make_sequence(3), make_sequence(12), make_sequence(9)]
    positions = np.arange(27).reshape(3, 9)
    sequences[1].images = PromptImages([PromptImage(b"a", np.array([3, 4, 6]), "file")], whole=True, past_windows=True)
    sequences[2].images = PromptImages([PromptImage(b"b", np.array([2, 3]), "file")], positions)
    for sequence in sequences:
        scheduler.add(sequence)
    writer, reader = StepWriter(), StepReader(SEQUENCES, LONGEST // BLOCK_SIZE)
    given = step_input(scheduler.schedule())
    assert given.images is not None
    features = torch.zeros(3, 5, 8)
    given = replace(given, images=replace(given.images, layers=2, features=features))
    read, _ = reader.read(_through_bytes(writer.write(given, None)))
    found, expected = read.images, given.images
    assert found is not None
    assert expected is not None
    assert np.array_equal(found.rows, [6, 7, 9, 17, 18])
    assert (found.layers, found.features, len(found.parts)) == (2, None, 0)
    assert expected.seen is not None
    assert np.array_equal(found.seen, expected.seen)
    assert np.array_equal(read.offsets, [0, 0, 18])
    assert [(row, own.tolist()) for row, own in found.axes] == [(15, positions.tolist())]


def test_steps_of_text_say_nothing_of_images() -> None:
    scheduler = Scheduler(BlockManager(64, BLOCK_SIZE), SEQUENCES, 32, LONGEST)
    scheduler.add(make_sequence(3))
    message = StepWriter().write(step_input(scheduler.schedule()), None)
    assert (message.offsets, message.images) == (None, None)


def test_states_to_copy_arrive() -> None:
    snapshots = Snapshots(range(SEQUENCES, SEQUENCES + 2), BLOCK_SIZE, BLOCK_SIZE)
    scheduler = Scheduler(BlockManager(64, BLOCK_SIZE), SEQUENCES, 32, LONGEST, True, snapshots=snapshots)
    writer, reader = StepWriter(), StepReader(SEQUENCES, LONGEST // BLOCK_SIZE)
    copies = []
    for _ in range(2):
        scheduler.add(make_sequence(BLOCK_SIZE + 6, max_tokens=1))
        while scheduler.has_work:
            step = scheduler.schedule()
            given, _ = reader.read(_through_bytes(writer.write(step_input(step), None)))
            copies.append((list(map(tuple, given.restored)), list(map(tuple, given.saved))))
            scheduler.advance(step)
            scheduler.resolve(step, [5] * step.num_sampled)
    assert copies == [([], [(0, SEQUENCES + 1)]), ([], []), ([(SEQUENCES + 1, 0)], [])]


def test_draft_tokens_arrive() -> None:
    scheduler = Scheduler(BlockManager(64, BLOCK_SIZE), SEQUENCES, 32, LONGEST)
    sequence = make_sequence(3)
    scheduler.add(sequence)
    step = scheduler.schedule()
    writer, reader = StepWriter(), StepReader(SEQUENCES, LONGEST // BLOCK_SIZE)
    scheduler.advance(step)
    scheduler.resolve(step, [5])
    step = scheduler.schedule()
    for drafts in ([], [7, 8]):
        step.schedule_drafts({sequence.request_id: drafts})
        read, _ = reader.read(_through_bytes(writer.write(step_input(step), None)))
        assert read.ids == [5, *drafts]
        assert read.wanted.tolist() == [*range(1 + len(drafts))]
