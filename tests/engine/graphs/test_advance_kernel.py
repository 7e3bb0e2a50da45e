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


def test_sequences_go_on_by_a_token_and_their_last_part_with_them() -> None:
    run_interpreted(CHECK)
