"""Batches cut into groups of one fixed size, one token a sequence: whatever the batch, the same kernels add the same way.

Every token goes through the graph of that one size: GEMMs, reductions and attention are chosen for the size, not for the
batch, and no token's sums depend on the other tokens of its group. Tokens of one chunk see each other because every layer
of that graph writes the keys and values of the whole group before it attends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch

from server.engine.runtime.batch import Batch, Spans

# A decode graph of this size takes little longer than one of a single token, and prefill goes through it, too.
INVARIANT_ROWS = 32


def in_groups(batch: Batch, block_size: int, size: int = INVARIANT_ROWS) -> Iterator[tuple[int, Batch]]:
    """Yield the batch's tokens in order, up to size at a time, each as a span of its own; with the row of the first."""
    spans, count = batch.spans, batch.num_tokens
    of = np.repeat(np.arange(len(spans)), spans.lengths)
    positions = np.arange(count) - spans.first_rows[of] + spans.starts[of]
    adapters = [spans.adapters[index] for index in of.tolist()]
    rows = _first_rows(size, batch.ids.device)
    for first in range(0, count, size):
        cut = slice(first, min(first + size, count))
        starts = positions[cut]
        counts = starts // block_size + 1
        own = Spans(spans.tables, spans.rows[of[cut]], starts, np.ones_like(starts), counts, adapters[cut])
        yield (
            first,
            Batch(batch.ids[cut], batch.positions[cut], batch.slots[cut], rows[: len(own)], own, len(own)),
        )


def run_in_groups(batch: Batch, run: Callable[[Batch], torch.Tensor], block_size: int, logits: torch.Tensor) -> None:
    """Fill logits, float32 [batch.sampled_rows, vocabulary], with those of each group by run()."""
    wanted = batch.sampled_rows.tolist()
    for first, group in in_groups(batch, block_size):
        found = run(group)
        for index, row in enumerate(wanted):
            if first <= row < first + group.num_tokens:
                logits[index] = found[row - first]


@cache
def _first_rows(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)
