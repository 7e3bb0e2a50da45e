"""Steps of attention over a paged cache on a GPU, beside the reference in float32."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from nf4_kernels.cuda.device import capability
from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.paged_cuda import CudaBackend
from server.engine.runtime.attention.sdpa import SdpaBackend
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.graphs.invariant import in_groups
from server.engine.runtime.trials import relative_error

DEVICE = torch.device("cuda", 0)
BLOCK = 16
PLAIN, WINDOW, CAPPED = (
    AttentionOptions(0.09),
    AttentionOptions(0.1, window=64),
    AttentionOptions(0.2, window=300, softcap=3.0),
)
# Largest error of an output of about 1, of caches in 16 bits.
TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 0.01}
# The error's norm beside the result's, of caches in 8 bits. What the cache loses is in the reference, too; but values
# half-way between two of 8 bits may go either way, and in a decode step the newest token has 16 bits.
RELATIVE = {torch.int8: 0.02, torch.float8_e4m3fn: 0.08}
FP8 = pytest.mark.skipif(
    torch.cuda.is_available() and capability(DEVICE) < (8, 9), reason="this GPU does not compute in fp8"
)
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def as_cached(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [tokens, heads, dim] in float32, as a cache of that dtype has it: a scale for each token and head."""
    wide = x.float()
    if dtype not in LIMITS:
        return wide
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scaled = wide * (LIMITS[dtype] / largest)
    return (torch.floor(scaled + 0.5) if dtype == torch.int8 else scaled).to(dtype).float() * (largest / LIMITS[dtype])


def make_batch(pieces: list[tuple[int, int]], tables: list[tuple[int, ...]]) -> Batch:
    """A step in which sequence i computes tokens [start, end) = pieces[i]; those of one token first."""
    spans, slots, row = [], [], 0
    for (start, end), table in zip(pieces, tables, strict=True):
        spans.append(Span(row, start, end - start, table[: -(-end // BLOCK)]))
        slots += [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, end)]
        row += end - start
    numbers = torch.tensor(slots, device=DEVICE)
    return Batch(numbers, numbers, numbers, numbers, Spans.of(spans), sum(span.length == 1 for span in spans))


def check(
    shape: LayerShape,
    options: AttentionOptions,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    earlier: list[int],
    now: list[int],
    graph: str = "",
    factors: tuple[float, float, float] = (1, 1, 1),
) -> None:
    """Compare a step with the reference. earlier, now: tokens of each sequence before and after it.

    factors: what random queries, keys and values are multiplied by.

    graph: "decode", "shared" or "mixed": the step is laid out as for a graph that is larger than it. In a shared one each
    token is a sequence of its own.
    """
    torch.manual_seed(0)
    blocks = list(range(sum(-(-end // BLOCK) for end in now) + 5))
    random.Random(1).shuffle(blocks)
    free = iter(blocks)
    tables = [tuple(itertools.islice(free, -(-end // BLOCK))) for end in now]
    tested = CudaBackend([shape], [options], len(blocks), BLOCK, cache_dtype, DEVICE)
    if graph:
        tested.set_up_graphs(max(now), sum(now) - sum(earlier) + 3, True)
    reference = SdpaBackend([shape], len(blocks), BLOCK, torch.float32, DEVICE)
    before = [i for i, end in enumerate(earlier) if end > 0]
    for pieces, sequences in (
        ([(0, earlier[i]) for i in before], before),
        (list(zip(earlier, now, strict=True)), range(len(now))),
    ):
        if not pieces:
            continue
        # One-token sequences come first.
        order = sorted(range(len(pieces)), key=lambda i: pieces[i][1] - pieces[i][0] > 1)
        batch = make_batch([pieces[i] for i in order], [tables[sequences[i]] for i in order])
        tokens = batch.slots.shape[0]
        made = [
            (torch.randn(tokens, heads, shape.key_dim, device=DEVICE) * factor).to(dtype)
            for heads, factor in zip((shape.heads, shape.kv_heads, shape.kv_heads), factors, strict=True)
        ]
        # An outlier channel, as keys have them.
        made[1][:, :, -1 if shape.is_latent else 3] *= 6
        if shape.is_latent:
            made[2] = made[1][..., : shape.value_dim]
        reference.begin(batch)
        kept = [as_cached(x, cache_dtype) for x in made[1:]]
        expected = reference.attend(0, made[0].float(), *kept, options)
        padding = 0
        if graph and sequences != before:
            padding = 3
            slots = torch.cat((batch.slots, torch.full((padding,), tested.scratch_block * BLOCK, device=DEVICE)))
            if graph in ("decode", "shared"):
                singles = next(in_groups(batch, BLOCK, tokens))[1].spans if graph == "shared" else batch.spans
                tested.plan_decode_graph(singles, tokens + padding)
                tested.begin_decode_graph(slots, graph == "shared")
            else:
                tested.begin_mixed_graph(slots, tested.plan_mixed_graph(batch.spans, tokens + padding, len(now) + 3))
            made = [torch.cat((x, torch.randn_like(x[:1]).expand(padding, -1, -1))) for x in made]
        else:
            tested.begin(batch)
        found = tested.attend(0, *made, options)[:tokens]
        assert found.dtype == dtype
        if cache_dtype in RELATIVE:
            assert relative_error(found, expected) < RELATIVE[cache_dtype], graph
        else:
            assert (found - expected).abs().max() < TOLERANCES[dtype], graph
