"""Keys of each thread block of the decode kernel, and its block tables; the kernel itself is tested in
test_attention_cuda.py."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from server.engine.runtime.attention.kernels.decode.attention import FIELDS, HEADER, item_places, layout
from server.engine.runtime.attention.kernels.decode.key_parts import SMALLEST_PART, Room, split_keys
from server.engine.runtime.attention.kernels.device_tables import DeviceTables
from server.engine.runtime.batch import Spans
from server.engine.scheduling.block_tables import BlockTables

H200 = Room.of(132, 8)


def split(lengths: Sequence[int], room: Room, window: int | None = None) -> list[tuple[int, int, int, int, int]]:
    items = split_keys(np.array(lengths), room, window)
    columns = (items.sequence, items.begin, items.end, items.first, items.parts)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_parts_are_all_keys_once_and_fit(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [int(2 ** rng.uniform(0, 15)) for _ in range(rng.choice((1, 2, 7, 40, 128)))]
    spare, window = rng.choice((1, 9, 66)), rng.choice((None, 1, 100, 4096))
    items = split(lengths, Room(rng.choice((1, 8, 66)), spare), window)
    assert len(items) <= len(lengths) + spare
    for sequence, length in enumerate(lengths):
        own = [index for index, item in enumerate(items) if item[0] == sequence]
        assert own == list(range(own[0], own[-1] + 1))
        assert all(items[index][3:] == (own[0], len(own)) for index in own)
        keys = [key for index in own for key in range(items[index][1], items[index][2])]
        assert keys == list(range(max(0, length - (window or length)), length))


@pytest.mark.parametrize(
    ("sequences", "length", "items", "longest"),
    [
        (1, 255, 4, 64),
        (8, 2000, 64, 256),
        (32, 255, 64, 128),
        (1, 32_000, 63, 512),
        (64, 8000, 64, 8000),
        (200, 160, 200, 160),
        # One wave of 64 items, not one and a fifth.
        (16, 12_000, 64, 3008),
    ],
)
def test_items_fill_whole_waves(sequences: int, length: int, items: int, longest: int) -> None:
    assert Room(66, 66) == H200
    found = split([length] * sequences, H200)
    assert len(found) == items
    assert max(end - begin for _, begin, end, _, _ in found) == longest


@pytest.mark.parametrize("seed", range(30))
def test_no_longer_parts_than_needed(seed: int) -> None:
    """The chosen length costs no more than any other one."""
    rng = random.Random(seed)
    lengths = np.array([int(2 ** rng.uniform(0, 13)) for _ in range(rng.randint(1, 66))])
    found = split(lengths.tolist(), H200)
    cost = -(-len(found) // H200.wave) * (max(end - begin for _, begin, end, _, _ in found) + SMALLEST_PART)
    for most in range(SMALLEST_PART, int(lengths.max()) + SMALLEST_PART, SMALLEST_PART):
        parts = [-(-n // most) if n > 1.25 * most else 1 for n in lengths.tolist()]
        own = [
            math.ceil(math.ceil(n / p) / SMALLEST_PART) * SMALLEST_PART if p > 1 else n
            for n, p in zip(lengths.tolist(), parts, strict=True)
        ]
        items = sum(-(-n // o) for n, o in zip(lengths.tolist(), own, strict=True))
        if items <= len(lengths) + H200.spare:
            assert cost <= -(-items // H200.wave) * (max(own) + SMALLEST_PART)


def test_few_keys_are_one_part_and_many_are_shared_out_evenly() -> None:
    assert split([SMALLEST_PART, 1], H200) == [(0, 0, SMALLEST_PART, 0, 1), (1, 0, 1, 1, 1)]
    # One long sequence beside short ones fills what they leave of a wave, or of the items where they fill it.
    for short, longest in ((31, 576), (100, 768)):
        items = split([300] * short + [20_000], H200)
        assert max(end - begin for _, begin, end, _, _ in items) <= longest
        assert {parts for sequence, _, _, _, parts in items if sequence < short} == {1}


def test_the_layout_is_where_the_kernel_looks() -> None:
    lengths, rows = np.array([300, 5]), np.array([7, 2])
    rooms = [Room(3, 3), Room(2, 4)]
    numbers = layout(lengths, rows, [None, 128], rooms)
    assert numbers.dtype == np.int32
    places = item_places(2, rooms)
    assert places == [HEADER, HEADER + (2 + 3) * FIELDS]
    for place, (window, room) in enumerate(zip((None, 128), rooms, strict=True)):
        items = split([300, 5], room, window)
        assert numbers[place] == len(items) <= len(lengths) + room.spare
        for index, (sequence, begin, end, first, parts) in enumerate(items):
            at = places[place] + index * FIELDS
            newest, row = ((299, 7), (4, 2))[sequence]
            assert numbers[at : at + FIELDS].tolist() == [sequence, begin, end, newest, first, parts, row, 0]
    assert len(numbers) == places[1] + numbers[1] * FIELDS


def step_of(tables: BlockTables, rows: list[int]) -> Spans:
    ends = tables.counts[rows]
    return Spans(tables, np.array(rows), ends - 1, np.ones_like(ends), ends, [None] * len(rows))


def test_the_devices_tables_get_what_is_new() -> None:
    tables, device = BlockTables(4, 6), DeviceTables(4, 8, 99, torch.device("cpu"))
    assert device.blocks[device.padding_row].tolist() == [99] * 8
    first, second = tables.take([5, 6, 7]), tables.take([1])
    assert device.take_new(step_of(tables, [first])).tolist() == [[first * 8 + i for i in range(3)], [5, 6, 7]]
    tables.extend(second, [1, 2])
    assert device.take_new(step_of(tables, [second, first])).tolist() == [[second * 8, second * 8 + 1], [1, 2]]
    assert device.take_new(step_of(tables, [second, first])).shape == (2, 0)
    third = tables.take([3, 2])
    assert device.take_new(step_of(tables, [second])).shape == (2, 0)
    # Nothing has changed since, but the step has another row.
    assert device.take_new(step_of(tables, [third])).tolist() == [[third * 8, third * 8 + 1], [3, 2]]
    changes = tables.changes
    tables.extend(third, [3, 2])
    assert tables.changes == changes
    # Another sequence's row is new even where it is as long.
    tables.give_back(first)
    assert tables.take([8, 9, 3]) == first
    tables.extend(second, [1, 2, 4])
    new = device.take_new(step_of(tables, [first, second]))
    assert new.tolist() == [[first * 8, first * 8 + 1, first * 8 + 2, second * 8 + 2], [8, 9, 3, 4]]
    # So are the rows of other tables.
    others = BlockTables(1, 6)
    row = others.take([7])
    assert device.take_new(step_of(others, [row])).tolist() == [[row * 8], [7]]
    assert device.take_new(step_of(tables, [second])).tolist() == [[second * 8 + i for i in range(3)], [1, 2, 4]]


def test_tokens_of_one_sequence_bring_its_blocks_once() -> None:
    tables, device = BlockTables(4, 6), DeviceTables(4, 8, 99, torch.device("cpu"))
    first, second = tables.take([5, 6]), tables.take([1])
    drafting = [first] * 2 + [second] * 3
    expected = [[first * 8, first * 8 + 1, second * 8], [5, 6, 1]]
    assert device.take_new(step_of(tables, drafting)).tolist() == expected
    assert device.take_new(step_of(tables, [*drafting, second])).shape == (2, 0)
    tables.extend(second, [1, 2])
    assert device.take_new(step_of(tables, drafting)).tolist() == [[second * 8 + 1], [2]]
