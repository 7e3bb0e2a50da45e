"""Page tables of a step, as FlashInfer's plans take them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from server.engine.runtime.batch import Spans


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


def page_tables(spans: Spans, block_size: int, part: slice = slice(None)) -> PageTables:
    """The tables of a part of a step's spans."""
    lengths, counts, last = spans.lengths[part], spans.counts[part], (spans.ends[part] - 1) % block_size + 1
    blocks = [spans.blocks_of(index) for index in range(*part.indices(len(spans)))]
    rows, starts = (np.append(0, column.cumsum()) for column in (lengths, counts))
    columns = rows, starts, np.concatenate(blocks), last
    return PageTables(*(torch.from_numpy(column.astype(np.int32)) for column in columns))
