"""Trial steps: mixed ones say of every token where it is."""

from __future__ import annotations

import pytest
import torch

from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.limits import ModelLimits
from server.engine.runtime.preparation.trial_steps import mixed_trial_steps


@pytest.mark.parametrize(("block_size", "steps"), [(1, 2), (2, 3), (16, 3), (256, 3)])
def test_trial_steps_lie_in_their_blocks(block_size: int, steps: int) -> None:
    def first_chunk(count: int) -> Batch:
        rows = torch.arange(count)
        spans = Spans.of([Span(0, 0, count, range(-(-count // block_size)))])
        return Batch(rows, rows, rows, rows, spans, int(count == 1))

    batches = list(mixed_trial_steps(first_chunk, block_size, ModelLimits(4096, 8, 100, (), 4)))
    assert len(batches) == steps
    for batch in batches:
        assert sum(span.length for span in batch.spans) == batch.num_tokens
        for span in batch.spans:
            rows = slice(span.row, span.row + span.length)
            positions = batch.positions[rows].tolist()
            assert positions == list(range(span.start, span.end))
            expected = [span.blocks[p // block_size] * block_size + p % block_size for p in positions]
            assert batch.slots[rows].tolist() == expected
        assert max(batch.sampled_rows.tolist()) == batch.num_tokens - 1
    # What the last step finds in the cache, the one before has written.
    if steps == 3:
        written = set(batches[1].slots.tolist())
        own = set(batches[2].slots.tolist())
        read = {
            span.blocks[p // block_size] * block_size + p % block_size
            for span in batches[2].spans
            for p in range(span.end)
        }
        assert read <= written | own
