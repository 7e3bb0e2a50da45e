"""Which thread block of the decode kernel takes which keys; the kernel itself is tested in test_attention_cuda.py."""

from __future__ import annotations

import random

import pytest

from server.engine.runtime.attention.decode import FIELDS, HEADER, SMALLEST_PART, layout, split_keys
from server.engine.runtime.batch import Span


@pytest.mark.parametrize("seed", range(30))
def test_parts_are_all_keys_once_and_fit(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [int(2 ** rng.uniform(0, 15)) for _ in range(rng.choice((1, 2, 7, 128)))]
    spare, window = rng.choice((1, 9, 66)), rng.choice((None, 1, 100, 4096))
    items = split_keys(lengths, spare, window)
    assert len(items) <= len(lengths) + spare
    for sequence, length in enumerate(lengths):
        own = [index for index, item in enumerate(items) if item[0] == sequence]
        assert own == list(range(own[0], own[-1] + 1))
        assert all(items[index][3:] == (own[0], len(own)) for index in own)
        keys = [key for index in own for key in range(items[index][1], items[index][2])]
        assert keys == list(range(max(0, length - (window or length)), length))


def test_few_keys_are_one_part_and_many_are_shared_out_evenly() -> None:
    assert split_keys([SMALLEST_PART, 1], 66, None) == [(0, 0, SMALLEST_PART, 0, 1), (1, 0, 1, 1, 1)]
    # One long sequence beside short ones: the parts are no longer than what each program gets of all keys.
    items = split_keys([300] * 31 + [20_000], 66, None)
    assert max(end - begin for _, begin, end, _, _ in items) <= 512
    assert {parts for sequence, _, _, _, parts in items if sequence < 31} == {1}


def test_the_layout_is_where_the_kernel_looks() -> None:
    spans = [Span(0, 299, 1, tuple(range(100, 119))), Span(1, 4, 1, (7,))]
    spare = 3
    numbers = layout(spans, [None, 128], spare)
    blocks = numbers[0]
    assert numbers[blocks:] == [*range(100, 119), 7]
    for place, window in enumerate((None, 128)):
        items = split_keys([300, 5], spare, window)
        assert numbers[1 + place] == len(items) <= len(spans) + spare
        for index, (sequence, begin, end, first, parts) in enumerate(items):
            at = HEADER + (place * (len(spans) + spare) + index) * FIELDS
            newest, start = ((299, 0), (4, 19))[sequence]
            assert numbers[at : at + FIELDS] == [sequence, begin, end, newest, first, parts, start, 0]
