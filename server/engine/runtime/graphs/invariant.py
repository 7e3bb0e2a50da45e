"""Batches cut into groups of one fixed size, one token a sequence: whatever the batch, the same kernels add the same way.

Every token goes through the graph of that one size: GEMMs, reductions and attention are chosen for the size, not for the
batch, and no token's sums depend on the other tokens of its group. Tokens of one chunk see each other because every layer
writes the keys and values of the whole group before it attends.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from server.engine.runtime.batch import Batch, Span

# A decode graph of this size takes little longer than one of a single token, and prefill goes through it, too.
INVARIANT_ROWS = 32


def in_groups(batch: Batch, block_size: int, size: int = INVARIANT_ROWS) -> Iterator[tuple[int, Batch]]:
    """The batch's tokens in order, up to size at a time, each as a span of its own; with the first one's row."""
    spans = [
        Span(0, position, 1, span.blocks[: position // block_size + 1], span.adapter)
        for span in batch.spans
        for position in range(span.start, span.end)
    ]
    rows = torch.arange(size, device=batch.ids.device)
    for first in range(0, len(spans), size):
        own = tuple(spans[first : first + size])
        cut = slice(first, first + len(own))
        yield (
            first,
            Batch(batch.ids[cut], batch.positions[cut], batch.slots[cut], rows[: len(own)], own, len(own)),
        )
