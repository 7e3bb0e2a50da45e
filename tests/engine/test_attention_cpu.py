"""Our C++ attention beside the reference backend, on random caches, chunks and shapes."""

from __future__ import annotations

import random

import pytest
import torch

from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.paged_cpu import PagedCpuBackend, paged_cpu_error
from server.engine.runtime.attention.sdpa import SdpaBackend
from server.engine.runtime.batch import Batch, Span

SIZE = 16
BLOCKS = 400


@pytest.fixture(autouse=True)
def _usable() -> None:
    reason = paged_cpu_error(torch.float32)
    if reason is not None:
        pytest.skip(reason)


def _batch(chunks: list[tuple[int, int]], rng: random.Random) -> Batch:
    """Sequences (start, length), those of one token first, in blocks drawn at random."""
    free = rng.sample(range(BLOCKS), BLOCKS)
    spans, slots, row = [], [], 0
    for start, length in chunks:
        blocks = tuple(free.pop() for _ in range(-(-(start + length) // SIZE)))
        spans.append(Span(row, start, length, blocks))
        slots += [blocks[p // SIZE] * SIZE + p % SIZE for p in range(start, start + length)]
        row += length
    rows = torch.arange(row)
    singles = sum(length == 1 for _, length in chunks)
    return Batch(rows, rows, torch.tensor(slots), rows[-1:], tuple(spans), singles)


def _fill(backend: SdpaBackend, keys: torch.Tensor, values: torch.Tensor) -> None:
    backend._keys[0].copy_(keys)
    backend._values[0].copy_(values)


CASES = [
    ([(0, 2)], {}),
    ([(0, 47), (0, 48), (0, 49), (0, 200)], {}),
    ([(9, 1), (300, 1), (256, 256), (0, 33)], {}),
    ([(1000, 130), (63, 2), (64, 65)], {}),
    ([(0, 300), (500, 70), (40, 1)][::-1], {"window": 50}),
    ([(200, 200), (3, 5)], {"window": 1}),
    ([(100, 129)], {"window": 64}),
    ([(37, 1), (100, 100), (0, 61)], {"softcap": 20.0}),
    ([(90, 100)], {"softcap": 5.0, "window": 33}),
]


@pytest.mark.parametrize(("chunks", "options"), CASES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim"),
    [(9, 3, 64, 64), (4, 4, 80, 80), (8, 1, 128, 128), (2, 1, 33, 20), (14, 2, 256, 256)],
)
def test_attends_as_the_reference(
    chunks: list[tuple[int, int]], options: dict[str, float], heads: int, kv_heads: int, key_dim: int, value_dim: int
) -> None:
    torch.manual_seed(len(chunks) + heads)
    shape = LayerShape(kv_heads, key_dim, value_dim, heads)
    how = AttentionOptions(key_dim**-0.5, options.get("window"), options.get("softcap"))  # type: ignore[arg-type]
    arguments = (BLOCKS, SIZE, torch.float32, torch.device("cpu"))
    ours, reference = PagedCpuBackend([shape], [how], *arguments), SdpaBackend([shape], *arguments)
    batch = _batch(sorted(chunks, key=lambda c: c[1] > 1), random.Random(heads))
    keys, values = torch.randn(BLOCKS, SIZE, kv_heads, key_dim), torch.randn(BLOCKS, SIZE, kv_heads, value_dim)
    # Heads before tokens in memory, as models hand them over; large scores, as they come from real weights.
    query = torch.randn(heads, batch.num_tokens, key_dim).transpose(0, 1) * 4
    key = torch.randn(kv_heads, batch.num_tokens, key_dim).transpose(0, 1)
    value = torch.randn(batch.num_tokens, kv_heads, value_dim)
    outputs = []
    for backend in (ours, reference):
        _fill(backend, keys, values)
        backend.begin(batch)
        outputs.append(backend.attend(0, query, key, value, how))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=2e-5)
    assert torch.equal(ours._keys[0], reference._keys[0])
    assert torch.equal(ours._values[0], reference._values[0])
