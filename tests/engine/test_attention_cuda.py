"""FlashInfer's attention beside the reference in float32: one-token sequences and chunks in one step, shuffled blocks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions, LayerShape
from server.engine.runtime.attention.factory import long_chunks_kernels
from server.engine.runtime.attention.flashinfer import LONG_CHUNKS, FlashInferBackend
from server.engine.runtime.attention.sdpa import SdpaBackend
from server.engine.runtime.batch import Batch, Span

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = torch.device("cuda", 0)
BLOCK = 16
SHAPES = [LayerShape(2, 128, 128, 8)] * 2
OPTIONS = [AttentionOptions(128**-0.5), AttentionOptions(0.1, window=64)]


def make_batch(pieces: list[tuple[int, int]], tables: list[tuple[int, ...]]) -> Batch:
    """A step in which sequence i computes tokens [start, end) = pieces[i]; those of one token first."""
    spans, slots, row = [], [], 0
    for (start, end), table in zip(pieces, tables, strict=True):
        spans.append(Span(row, start, end - start, table[: -(-end // BLOCK)]))
        slots += [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, end)]
        row += end - start
    numbers = torch.tensor(slots, device=DEVICE)
    singles = sum(span.length == 1 for span in spans)
    return Batch(numbers, numbers, numbers, numbers, tuple(spans), singles)


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ([699, 40, 100, 0, 3], [700, 41, 400, 513, 8]),
        ([0, 1000], [700, 1300]),
        ([15, 16, 17], [16, 17, 18]),
        ([5, 0], [6, LONG_CHUNKS - 1]),
        ([5, 0], [6, LONG_CHUNKS]),
    ],
)
def test_a_step_attends_as_the_reference(earlier: list[int], now: list[int]) -> None:
    """earlier, now: tokens of each sequence before and after the step."""
    torch.manual_seed(0)
    blocks = list(range(200))
    random.Random(1).shuffle(blocks)
    free = iter(blocks)
    tables = [tuple(itertools.islice(free, -(-end // BLOCK))) for end in now]
    kernels = long_chunks_kernels(tuple(SHAPES), tuple(OPTIONS), BLOCK, torch.bfloat16, DEVICE)
    assert kernels == ("fa3" if torch.cuda.get_device_capability() == (9, 0) else None)
    tested = FlashInferBackend(SHAPES, OPTIONS, len(blocks), BLOCK, torch.bfloat16, DEVICE, kernels)
    reference = SdpaBackend(SHAPES, len(blocks), BLOCK, torch.float32, DEVICE)
    before = [i for i, end in enumerate(earlier) if end > 0]
    # The tokens before, as a step of their own, and then the step.
    for pieces, sequences in (
        ([(0, earlier[i]) for i in before], before),
        (list(zip(earlier, now, strict=True)), range(len(now))),
    ):
        batch = make_batch(pieces, [tables[i] for i in sequences])
        rows = batch.slots.shape[0]
        for backend in (tested, reference):
            backend.begin(batch)
        for layer, options in enumerate(OPTIONS):
            query, key, value = (
                torch.randn(rows, heads, 128, device=DEVICE, dtype=torch.bfloat16) for heads in (8, 2, 2)
            )
            found = attend(tested, layer, query, key, value, options)
            expected = attend(reference, layer, query.float(), key.float(), value.float(), options)
            assert (found - expected).abs().max() < 0.03, f"layer {layer}"


def attend(
    backend: AttentionBackend,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    return backend.attend(layer, query, key, value, options).float()
