"""The Triton kernels for heads of 256 and 512 elements: in the interpreter against float64, and compiled for small GPUs."""

from __future__ import annotations

import pytest

from tests.engine.attention.test_shared_tokens import STEP
from tests.engine.attention.test_warp_tiles import DECODE
from tests.engine.compiled import run_compiled
from tests.engine.interpreted import run_interpreted

DECODED = {
    "parts": f"{STEP}numbers = check([126, 61, 300], [9, 8, 1], group=8, dim=512, spare=60)\nassert numbers[0] > 25",
    "a window": f"{STEP}check([100, 2, 40], [20, 3, 1], group=4, dim=512, window=33)",
    "written before": f"{STEP}check([0, 60], [4, 9], group=8, dim=512, spare=0, shared=Shared.WRITTEN)",
    # The interpreter knows no conversion from int8 to bfloat16.
    "8 bits": f"{DECODE}check(torch.float16, torch.int8, 8, 512, [1, 65, 150])",
}
# What nothing has written in the cache, and in the result, is not a number.
CHUNKS = """
import math
import numpy as np
import torch
from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.kernels import chunk_items
from server.engine.runtime.attention.kernels.chunk_kernel import attend_chunks, tokens_per_item
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.attention.kernels.kv_write import write_kv
from server.engine.runtime.trials import relative_error

CPU = torch.device("cpu")


def check(capability, dim, group, starts, lengths, window=None):
    torch.cuda.get_device_capability = lambda device=None: capability
    torch.manual_seed(dim)
    options, kv_heads, size, dtype = AttentionOptions(0.1, window=window), 2, 16, torch.float16
    per = -(-max(a + b for a, b in zip(starts, lengths)) // size)
    tables = torch.randperm(len(starts) * per).to(torch.int32).view(len(starts), per)
    cache = LayerCache(torch.full((len(starts) * per, 2, size, kv_heads, dim), math.nan, dtype=dtype), None)
    queries, expected = [], []
    for table, had, more in zip(tables, starts, lengths):
        key, value = torch.randn(2, had + more, kv_heads, dim).to(dtype)
        at = torch.arange(had + more)
        write_kv(cache.data, key, value, table[at // size].long() * size + at % size)
        query = torch.randn(more, kv_heads * group, dim).to(dtype)
        scores = torch.einsum("qhgd,nhd->hgqn", query.double().view(more, kv_heads, group, dim), key.double()) * 0.1
        seen = at <= at[had:, None]
        if window:
            seen = seen & (at > at[had:, None] - window)
        p = scores.masked_fill(~seen, -math.inf).softmax(-1)
        expected.append(torch.einsum("hgqn,nhd->qhgd", p, value.double()).flatten(1, 2))
        queries.append(query)
    query, lengths, starts = torch.cat(queries), np.array(lengths), np.array(starts)
    items = tokens_per_item(Kind(kv_heads * group, kv_heads, dim, options), CPU)
    columns = lengths.cumsum() - lengths, lengths, starts, np.arange(len(starts))
    numbers = torch.from_numpy(chunk_items.layout(*columns, items))
    # Room for more items than there are, as in a graph.
    numbers = torch.cat((numbers, torch.full((3, numbers.shape[1]), -1, dtype=torch.int32)))
    out = torch.full_like(query, math.nan)
    attend_chunks(cache, query, out, numbers, len(numbers) - 1, tables, options)
    assert relative_error(out, torch.cat(expected)) < 0.001


"""
CHUNKED = {
    "512": "check((8, 0), 512, 8, [0, 37], [21, 9])",
    "512, few rows": "check((8, 6), 512, 8, [0, 37], [13, 5])",
    "512, a window": "check((8, 6), 512, 4, [50, 0], [19, 3], window=20)",
    "256, few rows": "check((8, 6), 256, 3, [0, 70], [50, 9])",
}
COMPILED = {
    "decode": (STEP, "check([126, 61], [9, 8], group=8, dim=512)"),
    "decode in 8 bits": (DECODE, "check(torch.bfloat16, torch.int8, 8, 512, [1, 65])"),
    "chunks": (CHUNKS, "check(capability, 512, 8, [0], [21])"),
    "chunks of 256": (CHUNKS, "check(capability, 256, 8, [0], [21])"),
}


@pytest.mark.parametrize("name", DECODED)
def test_long_heads_in_decode_steps(name: str) -> None:
    pytest.importorskip("triton")
    run_interpreted(DECODED[name])


@pytest.mark.parametrize("name", CHUNKED)
def test_long_heads_in_chunks(name: str) -> None:
    pytest.importorskip("triton")
    run_interpreted(CHUNKS + CHUNKED[name])


@pytest.mark.parametrize(("capability", "room"), [((8, 0), 163), ((8, 6), 99), ((9, 0), 227)])
@pytest.mark.parametrize("name", COMPILED)
def test_long_heads_fit_in_shared_memory(name: str, capability: tuple[int, int], room: int) -> None:
    """`room` KiB is what a thread block may have."""
    pytest.importorskip("triton")
    step, call = COMPILED[name]
    step = step.replace("lambda device=None: (8, 0)", "lambda device=None: capability")
    # Nothing is computed, so nothing is right.
    run_compiled(
        f"capability = {capability}\n{step}try:\n    {call}\nexcept AssertionError:\n    pass\n"
        f"assert 0 < max(shared_memory.values()) <= {room} * 2**10, shared_memory",
        capability,
    )
