"""The decode kernel for tokens of one sequence that see each other, in Triton's interpreter, and their layout."""

from __future__ import annotations

import numpy as np
import pytest

from server.engine.runtime.attention.kernels.decode.attention import tokens_before
from tests.engine.interpreted import run_interpreted

# Sequences with cached keys and new tokens, whose keys and values the cache does not have; the same in float64. What nothing
# has written in the cache is not a number.
STEP = """
import math
import numpy as np
import torch
from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.kernels.decode.attention import FIELDS, HEADER, layout
from server.engine.runtime.attention.kernels.decode.triton_kernel import Partials, attend_newest
from server.engine.runtime.attention.kernels.instances import Shared
from server.engine.runtime.attention.kernels.decode.key_parts import Room
from server.engine.runtime.attention.kernels.kv_cache import LayerCache
from server.engine.runtime.trials import relative_error

# The interpreter runs on a CPU.
torch.cuda.get_device_capability = lambda device=None: (8, 0)


def check(cached, new, group=3, dim=64, window=None, cap=None, sinks=None, spare=6, shared=Shared.IN_ROWS):
    torch.manual_seed(sum(cached))
    kv_heads, size, dtype = 2, 16, torch.float16
    options = AttentionOptions(0.3, window=window, softcap=cap)
    per = -(-max(a + b for a, b in zip(cached, new)) // size) + 1
    tables = torch.randperm(len(cached) * per).to(torch.int32).view(len(cached), per)
    cache = LayerCache(torch.full((len(cached) * per, 2, size, kv_heads, dim), math.nan, dtype=dtype), None)
    query, key, value, expected, places = [], [], [], [], []
    for table, had, more in zip(tables, cached, new):
        keys, values = torch.randn(2, had + more, kv_heads, dim).to(dtype)
        at = torch.arange(had + more)
        slots = table[at // size].long(), at % size
        # The launch in front has written the new ones, too, or nothing has.
        there = had + more if shared is Shared.WRITTEN else had
        cache.data[slots[0][:there], 0, slots[1][:there]] = keys[:there]
        cache.data[slots[0][:there], 1, slots[1][:there]] = values[:there]
        own = torch.randn(more, kv_heads * group, dim).to(dtype)
        wide = own.double().view(more, kv_heads, group, dim)
        scores = torch.einsum("qhgd,nhd->hgqn", wide, keys.double()) * options.scaling
        if cap:
            scores = cap * (scores / cap).tanh()
        seen = at <= at[had:, None]
        if window:
            seen = seen & (at > at[had:, None] - window)
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(kv_heads, group, 1, 1).expand(-1, -1, more, 1)), -1)
        p = scores.softmax(-1)[..., : had + more]
        expected.append(torch.einsum("hgqn,nhd->qhgd", p, values.double()).flatten(1, 2))
        query.append(own), key.append(keys[had:]), value.append(values[had:])
        places.append([own[had:] for own in slots])
    # Three tokens of padding, of a row of their own with a scratch block. All are parts of one tensor, with others between.
    query, key, value = (torch.cat((*own, own[0][:1].expand(3, -1, -1))) for own in (query, key, value))
    joined = torch.full((len(query), kv_heads * (group + 3) + 1, dim), math.nan, dtype=dtype)
    given, at = [], 1
    for own in (query, key, value):
        joined[:, at : at + own.shape[1]] = own
        given.append(joined[:, at : at + own.shape[1]])
        at += own.shape[1] + (0 if own is query else 1)
    query, key, value = given
    value = value.transpose(0, 1).contiguous().transpose(0, 1)
    cache = LayerCache(torch.cat((cache.data, torch.zeros_like(cache.data[:1]))), None)
    tables = torch.cat((tables, torch.full((1, per), len(cache.data) - 1, dtype=torch.int32)))
    lengths = np.array([a + i + 1 for a, b in zip(cached, new) for i in range(b)] + [1] * 3)
    rows = np.append(np.repeat(np.arange(len(cached)), new), [len(cached)] * 3)
    room = Room(spare, spare)
    numbers = torch.from_numpy(layout(lengths, rows, [window], [room]))
    items = (len(numbers) - HEADER) // FIELDS
    partials = Partials(items, kv_heads, kv_heads * group, dim, torch.device("cpu"))
    found = attend_newest(
        cache, query, key, value, numbers, HEADER, 0, items, tables, partials, options, None, sinks=sinks,
        shared=shared,
    )
    begin = 0
    for own, (blocks, offsets), more in zip(expected, places, new):
        error = relative_error(found[begin : begin + more], own)
        assert error < 0.001, (cached, new, window, error)
        for part, given in ((0, key), (1, value)):
            assert torch.equal(cache.data[blocks, part, offsets], given[begin : begin + more])
        begin += more
    if shared is Shared.WRITTEN and spare == 0:
        # Each token alone has the same bits: its keys are one part, whatever else the launch computes.
        for token, (length, row) in enumerate(zip(lengths, rows)):
            one = torch.from_numpy(layout(lengths[[token]], rows[[token]], [window], [room]))
            own = (rows_of[token : token + 1] for rows_of in (query, key, value))
            partials = Partials(len(one), kv_heads, kv_heads * group, dim, torch.device("cpu"))
            alone = attend_newest(
                cache, *own, one, HEADER, 0, 1, tables, partials, options, None, sinks=sinks, shared=shared
            )
            assert torch.equal(alone[0], found[token]), token
    return numbers


"""
STEPS = {
    "one of many": "check([130], [8])",
    "several": "check([0, 3, 70, 200], [4, 1, 16, 2])",
    # Tokens of more than one tile.
    "many": "check([0, 100], [19, 17])",
    # Parts of 64 keys: the first keys of the last one are among the step's.
    "parts": "numbers = check([126, 61], [9, 8], spare=60)\nassert numbers[0] > 20 + 9",
    "a window": "check([100, 2], [20, 20], window=11)",
    "sinks and a cap": "check([60], [5], cap=2.0, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0, 2.0, 1.0]))",
    "a large group": "check([60, 9], [5, 2], group=8, dim=128)",
    "written before": "check([0, 3, 70, 200], [4, 1, 16, 2], shared=Shared.WRITTEN)",
    "written before, in one part each": "check([0, 130, 61], [9, 8, 1], spare=0, shared=Shared.WRITTEN)",
    "written before, with a window": "check([100, 2], [5, 8], window=11, spare=0, shared=Shared.WRITTEN)",
}


@pytest.mark.parametrize("name", STEPS)
def test_tokens_of_one_sequence_see_those_in_front_of_them(name: str) -> None:
    pytest.importorskip("triton")
    run_interpreted(STEP + STEPS[name])


@pytest.mark.parametrize(
    ("rows", "before"),
    [([7], None), ([4, 2, 9], None), ([3, 3, 3], [0, 1, 2]), ([5, 5, 1, 8, 8, 8], [0, 1, 0, 0, 1, 2])],
)
def test_how_many_tokens_are_in_front(rows: list[int], before: list[int] | None) -> None:
    # Each token has one key more than the one in front of it, as far as that is of its sequence.
    lengths = [40 + index for index in range(len(rows))]
    found = tokens_before(np.array(lengths), np.array(rows))
    assert (None if found is None else found.tolist()) == before
