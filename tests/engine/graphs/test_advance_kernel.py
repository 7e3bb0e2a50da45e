"""The kernels that lay out a draft model's next step, in Triton's interpreter, where Triton is installed."""

from __future__ import annotations

import pytest

from tests.engine.interpreted import run_interpreted

pytest.importorskip("triton")

CHECK = """
import numpy as np
import torch
from server.engine.runtime.attention.kernels.advance_kernel import advance
from server.engine.runtime.attention.kernels.decode.attention import FIELDS, HEADER, layout
from server.engine.runtime.attention.kernels.decode.key_parts import Room

rng = np.random.default_rng(0)
BLOCK, ROOM = 16, Room(66, 66)
for size, count, going in ((1, 1, 1), (4, 3, 3), (8, 8, 5), (16, 11, 1), (32, 32, 32)):
    lengths = rng.integers(1, 3000, size)
    lengths[count:] = 1
    rows = rng.permutation(40)[:size]
    tables = torch.from_numpy(rng.integers(0, 10**6, (40, 200)).astype(np.int32))
    places = np.append(lengths[:count] - 1, np.zeros(size - count, np.int64))
    slots = tables.numpy()[rows, places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK
    ids = rng.integers(0, 100, size)
    inputs = torch.from_numpy(np.stack((ids, places + 7, slots)))
    numbers = torch.from_numpy(layout(lengths, rows, [None], [ROOM]))
    tail = torch.full((4 * FIELDS,), -9, dtype=torch.int32)
    numbers = torch.cat((numbers, tail))
    before = numbers.clone()
    for step in range(1, 40):
        tokens = torch.from_numpy(rng.integers(0, 100, going))
        advance(numbers, HEADER, FIELDS, size + ROOM.spare, inputs, tokens, tables, BLOCK)
        now = places.copy()
        now[:going] += step
        ids[:going] = tokens.numpy()
        assert inputs[0].tolist() == ids.tolist()
        assert inputs[1].tolist() == (now + 7).tolist()
        expected = tables.numpy()[rows, now // BLOCK].astype(np.int64) * BLOCK + now % BLOCK
        expected[going:] = slots[going:]
        assert inputs[2].tolist() == expected.tolist()
        items, old = (n[HEADER : HEADER + before[0] * FIELDS].view(-1, FIELDS).numpy() for n in (numbers, before))
        more = np.where(old[:, 0] < going, step, 0)
        last = old[:, 2] == old[:, 3] + 1
        assert np.bincount(old[:, 0], last, minlength=size).tolist() == [1] * size
        old = old.copy()
        old[:, 2] += more * last
        old[:, 3] += more
        assert (items == old).all()
        assert torch.equal(numbers[:HEADER], before[:HEADER])
        assert torch.equal(numbers[-len(tail) :], tail)
print("same")
"""


SHIFTED = """
import numpy as np
import torch
from server.engine.runtime.attention.kernels.accept_kernel import MOST_SEQUENCES, accept
from server.engine.runtime.attention.kernels.advance_kernel import advance
from server.engine.runtime.attention.kernels.decode.attention import FIELDS, HEADER, layout
from server.engine.runtime.attention.kernels.decode.key_parts import Room

rng = np.random.default_rng(1)
BLOCK, ROOM = 16, Room(66, 66)
for size, count in ((1, 1), (4, 3), (8, 8), (16, 11)):
    lengths = rng.integers(1, 3000, size)
    lengths[count:] = 1
    rows = rng.permutation(40)[:size]
    tables = torch.from_numpy(rng.integers(0, 10**6, (40, 200)).astype(np.int32))
    slots = torch.zeros(size, dtype=torch.int64)
    inputs = torch.stack((torch.full((size,), -1), torch.from_numpy(lengths + 6), slots))
    numbers = torch.from_numpy(layout(lengths, rows, [None], [ROOM]))
    old = numbers[HEADER : HEADER + numbers[0] * FIELDS].view(-1, FIELDS).numpy().copy()
    tokens, shifts = (torch.from_numpy(rng.integers(0, most, count)) for most in (100, 9))
    advance(numbers, HEADER, FIELDS, size + ROOM.spare, inputs, tokens, tables, BLOCK, shifts)
    more = np.append(shifts.numpy(), np.zeros(size - count, np.int64))
    assert inputs[0].tolist() == tokens.tolist() + [-1] * (size - count)
    assert inputs[1].tolist() == (lengths + 6 + more).tolist()
    now = lengths - 1 + more
    expected = tables.numpy()[rows, now // BLOCK].astype(np.int64) * BLOCK + now % BLOCK
    assert inputs[2].tolist() == expected[:count].tolist() + [0] * (size - count)
    last = old[:, 2] == old[:, 3] + 1
    old[:, 2] += more[old[:, 0]] * last
    old[:, 3] += more[old[:, 0]]
    assert (numbers[HEADER : HEADER + numbers[0] * FIELDS].view(-1, FIELDS).numpy() == old).all()

for sequences in (1, 2, 7, 64):
    ids, sampled, firsts, expected = [], [], [], []
    for _ in range(sequences):
        guesses = int(rng.integers(0, 9))
        right = int(rng.integers(0, guesses + 1))
        own = rng.integers(0, 1000, guesses + 1)
        found = np.append(own[1:], 1000 + rng.integers(0, 9))
        if right < guesses:
            found[right] += 2000
        firsts.append((len(ids), guesses))
        ids += own.tolist()
        sampled += found.tolist()
        expected.append((right, own[right], found[right]))
    numbers = torch.tensor(list(zip(*firsts)))
    shifts, tokens = accept(torch.tensor(ids), torch.tensor(sampled), numbers, int(numbers[1].max()))
    right, before, newest = map(torch.tensor, zip(*expected))
    assert sequences <= MOST_SEQUENCES
    assert torch.equal(shifts, right.repeat_interleave(2))
    assert torch.equal(tokens, torch.stack((before, newest), 1).flatten())
print("same")
"""

GUESSES = """
from types import SimpleNamespace

import numpy as np
import torch
import tests.engine.graphs.test_graph_inputs as inputs
from server.engine.runtime.attention.kernels.advance_kernel import advance
from server.engine.runtime.attention.kernels.decode.attention import FIELDS, HEADER, layout
from server.engine.runtime.attention.kernels.decode.key_parts import Room
from server.engine.runtime.speculation.draft_model_ahead import guesses_ahead
from server.engine.runtime.graphs.async_step import AsyncStep
from server.engine.runtime.transfers.host_results import Posted
from server.engine.scheduling.block_tables import BlockTables
from server.engine.scheduling.sequence import PLACEHOLDER, Sequence
from server.engine.scheduling.step import Chunk, Step
from tests.engine.factories import make_request

rng = np.random.default_rng(2)
BLOCK, ROOM, V = 16, Room(66, 66), inputs.VOCABULARY


class Backend:
    def host_layout(self, spans, size, shared=False):
        padding = size - len(spans)
        lengths = np.append(spans.ends, np.ones(padding, np.int64))
        rows = np.append(spans.rows, np.full(padding, 9))
        self.tables = torch.from_numpy(spans.tables.blocks)
        self.numbers = torch.from_numpy(layout(lengths, rows, [None], [ROOM]))

    def advance_decode_graph(self, own, tokens, shifts=None):
        items = own.shape[1] + ROOM.spare
        advance(self.numbers, HEADER, FIELDS, items, own, tokens, self.tables, BLOCK, shifts)
        return True


def graphs_of(backend, *sizes):
    graphs, pool, _ = inputs.make_graphs(*sizes)
    graphs._backend = backend
    replay = pool.replay

    def checked(step):
        # The layout and the inputs are of the same tokens.
        ids, positions, slots = step._graph["inputs"]
        items = backend.numbers[HEADER : HEADER + backend.numbers[0] * FIELDS].view(-1, FIELDS).numpy()
        real = slots.numpy()[items[:, 0]] != inputs.SCRATCH
        assert (items[real, 3] == positions.numpy()[items[real, 0]]).all()
        replay(step)

    pool.replay = checked
    pool._pinned = {s: [(t := torch.full((4, s), -5), t.numpy()) for _ in range(4)] for s in (1, 2, 4, 8, 16)}
    return graphs


for case in range(30):
    count = int(rng.integers(1, 6))
    tables, backend = BlockTables(10, 40), Backend()
    decode, verify = graphs_of(backend, 1, 2, 4, 8), graphs_of(backend, 2, 4, 8, 16)
    chunks, guesses, ids, sampled, expected, counts = [], {}, [], [], {}, {}
    for number in range(count):
        known, checked, wanted = int(rng.integers(2, 500)), int(rng.integers(1, 9)), int(rng.integers(1, 9))
        sequence = Sequence(make_request([3] * known, str(number), max_tokens=99), 0)
        sequence.take_row(tables)
        sequence.blocks = rng.permutation(50)[:40].tolist()
        tables.extend(sequence.row, sequence.blocks)
        chunks.append(Chunk(sequence, known - 1, 1, True))
        guesses[str(number)] = [PLACEHOLDER] * checked
        own = rng.integers(0, V, checked + 1)
        found, right = np.append(own[1:], rng.integers(0, V)), int(rng.integers(0, checked + 1))
        if right < checked:
            found[right] = (found[right] + 1) % V
        ids += own.tolist()
        sampled += found.tolist()
        counts[sequence], expected[str(number)] = wanted, []
        token = int(found[right])
        for place in range(known + right, known + right + wanted):
            slot = sequence.blocks[place // BLOCK] * BLOCK + place % BLOCK
            token = (7 * token + 3 * place + slot) % V
            expected[str(number)].append(token)
        sequence.tokens.append(PLACEHOLDER)
    step = Step(chunks, guesses=guesses)
    launched = AsyncStep(step, Posted(torch.tensor(sampled), None, None, None, None), torch.tensor(ids))
    paged = SimpleNamespace(block_size=BLOCK, vocab_size=V)
    found = guesses_ahead(launched, counts, decode, verify, paged, V)
    assert found.read() == expected
    # The step that checks them has perhaps fewer, in another order.
    order = rng.permutation(count).tolist()
    step = Step([chunks[i] for i in order])
    step.guesses = {str(i): [PLACEHOLDER] * int(rng.integers(1, len(expected[str(i)]) + 1)) for i in order[1:]}
    source = found.source(step)
    at = [[0, *(own if (own := expected[str(i)][: len(step.guesses.get(str(i), ()))]) else [])] for i in order]
    flat = [token for own in at for token in own]
    assert len(source) == len(flat)
    assert all(token == found.tokens[place] for place, token in zip(source, flat) if token or place)
    step.drafted = found
    step.read_guesses()
    assert step.guesses == {str(i): own[1:] for i, own in zip(order, at) if len(own) > 1}
print("same")
"""


def test_sequences_go_on_by_as_many_tokens_as_guesses_are_right() -> None:
    run_interpreted(SHIFTED)


def test_guesses_behind_unknown_tokens_are_those_behind_known_ones() -> None:
    run_interpreted(GUESSES)


def test_sequences_go_on_by_a_token_and_their_last_part_with_them() -> None:
    run_interpreted(CHECK)
