"""The Triton kernels over latents, in Triton's interpreter, compared with float64 arithmetic, and compiled."""

from __future__ import annotations

import pytest

from tests.engine.compiled import run_compiled
from tests.engine.interpreted import run_interpreted

# What nothing has written in the cache, and in memory that the kernels use for themselves, is not a number.
STEP = """
import math
import numpy as np
import torch
from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.kernels import chunk_items
from server.engine.runtime.attention.kernels.chunk_kernel import attend_chunks, tokens_per_item
from server.engine.runtime.attention.kernels.decode.attention import FIELDS, HEADER, layout
from server.engine.runtime.attention.kernels.decode.key_parts import Room
from server.engine.runtime.attention.kernels.decode.triton_kernel import Partials, attend_newest
from server.engine.runtime.attention.kernels.instances import Shared
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.attention.kernels.kv_write import write_kv
from server.engine.runtime.trials import relative_error

CPU, SIZE = torch.device("cpu"), 16


def tolerance(dtype):
    # The interpreter rounds a result down to bfloat16, by up to 2^-7 of itself.
    return 0.006 if dtype == torch.bfloat16 else 0.001


class Step:
    # Sequences with cached tokens and new ones, and what attention over their latents gives in float64.
    def __init__(self, cached, new, heads, rank, rotary, dtype, options=AttentionOptions(0.05), written=False):
        torch.manual_seed(sum(cached) + heads)
        self.options, self.rank, self.new = options, rank, new
        self.shape = LayerShape(1, rank + rotary, rank, heads, is_latent=True)
        per = -(-max(a + b for a, b in zip(cached, new)) // SIZE) + 1
        blocks = len(cached) * per + 1
        tables = torch.randperm(blocks - 1).to(torch.int32).view(len(cached), per)
        self.cache = LayerCache.zeros(self.shape, blocks, SIZE, dtype, CPU)
        assert self.cache.data.shape == (blocks, 1, SIZE, 1, rank + rotary)
        self.cache.data[:-1].fill_(math.nan)
        self.tables = torch.cat((tables, torch.full((1, per), blocks - 1, dtype=torch.int32)))
        rows, self.expected, slots = [], [], []
        for table, had, more in zip(tables, cached, new):
            latent = torch.randn(had + more, rank + rotary).to(dtype)
            at = torch.arange(had + more)
            own = table[at // SIZE].long() * SIZE + at % SIZE
            there = had + more if written else had
            self.flat()[own[:there]] = latent[:there]
            query = torch.randn(more, heads, rank + rotary).to(dtype)
            scores = torch.einsum("qhd,nd->hqn", query.double(), latent.double()) * options.scaling
            if options.softcap:
                scores = options.softcap * (scores / options.softcap).tanh()
            scores = scores.masked_fill(at > at[had:, None], -math.inf)
            if options.window:
                scores = scores.masked_fill(at <= at[had:, None] - options.window, -math.inf)
            self.expected.append(torch.einsum("hqn,nd->qhd", scores.softmax(-1), latent[:, :rank].double()))
            # Parts of one tensor, with others between.
            joined = torch.full((more, heads + 3, rank + rotary), math.nan, dtype=dtype)
            joined[:, 1:-2], joined[:, -1] = query, latent[had:]
            rows.append(joined)
            slots.append(own[had:])
        self.slots = torch.cat(slots)
        padding = torch.randn(3, heads + 3, rank + rotary).to(dtype)
        joined = torch.cat((*rows, padding))
        self.query, self.key = joined[:, 1:-2], joined[:, -1:]
        self.cached, self.expected = np.array(cached), torch.cat(self.expected)

    def flat(self):
        return self.cache.data.view(-1, self.cache.data.shape[-1])

    def decode(self, spare, shared=Shared.NO):
        heads, groups = self.query.shape[1], self.cache.groups(self.query.shape[1])
        count = np.array(self.new)
        lengths = np.concatenate([np.arange(a, a + b) + 1 for a, b in zip(self.cached, self.new)] + [np.ones(3, int)])
        table_rows = np.append(np.repeat(np.arange(len(count)), count), [len(count)] * 3)
        numbers = torch.from_numpy(layout(lengths, table_rows, [self.options.window], [Room(spare, spare)]))
        items = (len(numbers) - HEADER) // FIELDS
        partials = Partials(items, groups, heads, self.rank, CPU)
        partials.sums.fill_(math.nan), partials.weights.fill_(math.nan)
        found = attend_newest(
            self.cache, self.query, self.key, self.key[..., : self.rank], numbers, HEADER, 0, items, self.tables,
            partials, self.options, None, shared=shared,
        )
        self.check(found[:-3])
        assert not partials.arrived.any()
        return int(numbers[0])

    def chunks(self):
        tokens, per_item = sum(self.new), tokens_per_item(Kind.of(self.shape, self.options), CPU)
        key = self.key[:tokens]
        write_kv(self.cache.data, key, key[..., : self.rank], self.slots)
        lengths = np.array(self.new)
        rows = lengths.cumsum() - lengths
        numbers = torch.from_numpy(chunk_items.layout(rows, lengths, self.cached, np.arange(len(rows)), per_item))
        query = self.query[:tokens]
        out = torch.full((tokens, query.shape[1], self.rank), math.nan, dtype=query.dtype)
        attend_chunks(self.cache, query, out, numbers, len(numbers) - 1, self.tables, self.options)
        self.check(out)

    def check(self, found):
        assert found.shape == self.expected.shape
        error = relative_error(found, self.expected)
        assert error < tolerance(found.dtype), error
        assert torch.equal(self.flat()[self.slots], self.key[: sum(self.new), 0])


"""
STEPS = {
    "GLM": "Step([0, 63, 64, 200], [1] * 4, 20, 512, 64, torch.float16).decode(3)",
    "DeepSeek": "Step([130, 5], [1] * 2, 16, 512, 64, torch.float16).decode(0)",
    "MiniCPM": "Step([90, 31], [1] * 2, 40, 256, 32, torch.float16).decode(4)",
    "heads that do not divide": "Step([70], [1], 17, 256, 64, torch.float16).decode(2)",
    "one head of a rank": "Step([33], [1], 1, 256, 16, torch.float16).decode(0)",
    # Groups of 8 parts, the last of them with one part and with several.
    "many parts": "assert Step([1080, 600, 1], [1] * 3, 5, 256, 32, torch.float16).decode(40) == 31",
    "a window": "Step([100, 3], [1] * 2, 4, 256, 32, torch.float16, AttentionOptions(0.05, window=70)).decode(3)",
    "a window and a cap, draft tokens": "Step([160, 98, 15], [8, 4, 2], 16, 512, 64, torch.float16, "
    "AttentionOptions(0.2, window=100, softcap=3.0)).decode(40, Shared.IN_ROWS)",
    "a window and a cap, chunks": "Step([160, 98, 15], [8, 4, 2], 16, 512, 64, torch.float16, "
    "AttentionOptions(0.2, window=100, softcap=3.0)).chunks()",
    "a window, draft tokens": "Step([61, 200, 324, 1], [8, 4, 1, 3], 40, 256, 32, torch.float16, "
    "AttentionOptions(0.1, window=64)).decode(20, Shared.IN_ROWS)",
    "draft tokens": "Step([0, 3, 126], [4, 1, 9], 20, 512, 64, torch.float16).decode(9, Shared.IN_ROWS)",
    "written before": "Step([3, 60], [4, 9], 20, 512, 64, torch.float16, written=True).decode(0, Shared.WRITTEN)",
    "chunks": "Step([0, 3, 70], [40, 1, 5], 20, 512, 64, torch.float16).chunks()",
    "chunks of many heads": "Step([0, 40], [9, 37], 40, 256, 32, torch.float16).chunks()",
    "chunks on small GPUs": "Step([0, 30], [9, 17], 20, 512, 64, torch.float16).chunks()",
    "chunks with a window": "Step([60], [50], 3, 256, 64, torch.float16, AttentionOptions(0.05, window=33)).chunks()",
}


@pytest.mark.parametrize("name", STEPS)
def test_attention_over_latents(name: str) -> None:
    pytest.importorskip("triton")
    capability = (8, 9) if name == "chunks on small GPUs" else (8, 0)
    run_interpreted(f"{STEP}torch.cuda.get_device_capability = lambda device=None: {capability}\n{STEPS[name]}")


@pytest.mark.parametrize(("capability", "room"), [((8, 6), 99), ((9, 0), 227)])
@pytest.mark.parametrize("name", ["GLM", "a window and a cap, draft tokens", "written before", "many parts", "chunks"])
def test_kernels_over_latents_compile(name: str, capability: tuple[int, int], room: int) -> None:
    """With the shared memory that a thread block may have, `room` KiB."""
    pytest.importorskip("triton")
    # Nothing is computed.
    step = STEPS[name].removeprefix("assert ").removesuffix("== 31")
    code = f"{STEP}Step.check = lambda *_: None\n{step}\nassert max(shared_memory.values()) <= {room} * 2**10"
    run_compiled(code, capability)
