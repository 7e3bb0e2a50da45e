"""Division of the tokens of a step's chunks among the thread blocks of the chunk kernel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FIELDS = 4

_Numbers = npt.NDArray[np.int64]


def most_items(tokens: int, sequences: int, tokens_per_item: int) -> int:
    """The most items that chunks of `sequences` sequences with `tokens` tokens in all can have."""
    return tokens // tokens_per_item + min(tokens, sequences)


def layout(
    rows: _Numbers, lengths: _Numbers, starts: _Numbers, table_rows: _Numbers, tokens_per_item: int
) -> npt.NDArray[np.int32]:
    """A step's chunks as the kernel reads them: int32 [1 + items, FIELDS], the number of items first in the first row.

    rows, lengths, starts, table_rows: int64 [chunks], each chunk's first row of the batch, its tokens, the position of its
    first token and its row of the block tables. An item is some of a chunk's tokens: first row of the batch, tokens,
    position of the first one, row of the block tables. Items with the most keys come first, so that a long one does not
    begin last.
    """
    parts = -(-lengths // tokens_per_item)
    chunk = np.repeat(np.arange(len(lengths)), parts)
    begin = (np.arange(len(chunk)) - (parts.cumsum() - parts)[chunk]) * tokens_per_item
    count = np.minimum(tokens_per_item, lengths[chunk] - begin)
    items = np.stack((rows[chunk] + begin, count, starts[chunk] + begin, table_rows[chunk]), 1)
    items = items[np.argsort(-items[:, 2], kind="stable")]
    header = np.zeros((1, FIELDS), np.int64)
    header[0, 0] = len(items)
    return np.concatenate((header, items)).astype(np.int32)
