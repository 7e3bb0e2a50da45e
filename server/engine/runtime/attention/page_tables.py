"""Where a step's keys are, as FlashInfer's plans take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from server.engine.runtime.batch import Span


@dataclass
class PageTables:
    """A step's sequences and their KV blocks, int32 on the host."""

    rows: torch.Tensor
    """[sequences + 1]: where each sequence's queries begin."""
    starts: torch.Tensor
    """[sequences + 1]: where each sequence's blocks begin in blocks."""
    blocks: torch.Tensor
    """All sequences' KV blocks, one sequence after another."""
    last: torch.Tensor
    """[sequences]: tokens in each sequence's last block."""


def page_tables(spans: Sequence[Span], block_size: int) -> PageTables:
    """The tables of a step's spans."""
    rows, starts = [0], [0]
    blocks: list[int] = []
    last: list[int] = []
    for span in spans:
        rows.append(rows[-1] + span.length)
        blocks.extend(span.blocks)
        starts.append(len(blocks))
        last.append((span.end - 1) % block_size + 1)
    tensors = (torch.tensor(values, dtype=torch.int32) for values in (rows, starts, blocks, last))
    return PageTables(*tensors)
