"""Division of the tokens of a step's chunks among the thread blocks of the chunk kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from server.engine.runtime.attention.kernels.decode.key_parts import Items, Numbers, Room, split_keys

FIELDS = 8
# Keys of a part at least: the sums of one take as long to write and to read again as some hundred keys.
_SMALLEST_PART = 256
# Items beyond a wave of thread blocks that split keys may make: parts of few items fill the last of several waves.
_SPARE_WAVES = 3
# Waves of items whose keys are split. The last of more waves is idle for a smaller share of the time.
_FILLED_WAVES = 2


def chunk_room(processors: int, kv_heads: int) -> Room:
    """Room for parts of the keys of a step's items, on a device of so many multiprocessors, one thread block for each."""
    wave = max(1, processors // kv_heads)
    return Room(wave, _SPARE_WAVES * wave, _SMALLEST_PART, _FILLED_WAVES)


def most_items(tokens: int, sequences: int, tokens_per_item: int, room: Room | None = None) -> int:
    """The most items that chunks of `sequences` sequences with `tokens` tokens in all can have."""
    return tokens // tokens_per_item + min(tokens, sequences) + (0 if room is None else room.spare)


def _fills_badly(ends: Numbers, room: Room) -> bool:
    """Whether items with these keys leave thread blocks idle. In several waves, items of unlike lengths fill them."""
    count = len(ends)
    return 0 < count <= room.wave or (room.wave < count <= room.filled * room.wave and 2 * ends.min() > ends.max())


def layout(
    rows: Numbers,
    lengths: Numbers,
    starts: Numbers,
    table_rows: Numbers,
    tokens_per_item: int,
    room: Room | None = None,
) -> npt.NDArray[np.int32]:
    """A step's chunks as the kernel reads them: int32 [1 + items, FIELDS], the number of items first in the first row.

    rows, lengths, starts, table_rows: int64 [chunks], each chunk's first row of the batch, its tokens, the position of its
    first token and its row of the block tables. An item is some of a chunk's tokens and a part of the keys in front of its
    last token's end: first row of the batch, tokens, position of the first one, row of the block tables, the part's first
    key and its end, how many parts these tokens' keys have; such parts follow one another. Items with the most keys come
    first, so that a long one does not begin last. With room, keys are split where thread blocks would be idle otherwise.
    """
    parts = -(-lengths // tokens_per_item)
    chunk = np.repeat(np.arange(len(lengths)), parts)
    begin = (np.arange(len(chunk)) - (parts.cumsum() - parts)[chunk]) * tokens_per_item
    count = np.minimum(tokens_per_item, lengths[chunk] - begin)
    items = np.stack((rows[chunk] + begin, count, starts[chunk] + begin, table_rows[chunk]), 1)
    items = items[np.argsort(-items[:, 2], kind="stable")]
    ends = items[:, 2] + items[:, 1]
    if room is not None and _fills_badly(ends, room):
        spare = min(room.spare, room.wave + room.spare - len(items))
        of_keys = split_keys(ends, replace(room, spare=spare), None)
    else:
        places = np.arange(len(items))
        of_keys = Items(places, np.zeros_like(ends), ends, places, np.ones_like(ends))
    numbers = np.zeros((1 + len(of_keys.begin), FIELDS), np.int64)
    numbers[0, 0] = len(of_keys.begin)
    numbers[1:, :4], numbers[1:, 6] = items[of_keys.sequence], of_keys.parts
    numbers[1:, 4], numbers[1:, 5] = of_keys.begin, of_keys.end
    return numbers.astype(np.int32)
