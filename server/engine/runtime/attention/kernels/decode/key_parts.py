"""Which of a sequence's keys each thread block of the decode kernel takes, in steps of one token a sequence."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
SMALLEST_PART = 64
"""The decode kernel's parts have at least this many keys: reducing more parts would take longer than it saves."""
PER_PROCESSOR = 4
"""Thread blocks of the Triton kernel that a multiprocessor runs at a time."""
PER_PROCESSOR_LATENT = 2
"""The same over latents."""
_MOST_WAVES = 4


@dataclass(frozen=True)
class Room:
    """How many items a launch has thread blocks for."""

    wave: int
    """The items of a wave: those that the device runs at a time."""
    spare: int
    """The items that there may be beyond one for each sequence; 0: no sequence's keys are split."""
    smallest: int = SMALLEST_PART
    """Keys of the shortest part; the number of a part's keys is a multiple of it, but for a sequence's last part."""
    filled: int = 1
    """With sequences for so many waves, keys are split so that items fill whole waves; with more, to be of like lengths."""

    @classmethod
    def of(cls, processors: int, kv_heads: int, per_processor: int = PER_PROCESSOR) -> Room:
        """The room on a device with `processors` multiprocessors; every item has a thread block for each of kv_heads."""
        programs = per_processor * processors
        return cls(max(1, programs // kv_heads), -(-programs // kv_heads))


@dataclass(frozen=True)
class Items:
    """Parts of sequences' keys, in columns of int64 [items]; a sequence's parts follow one another."""

    sequence: Numbers
    begin: Numbers
    end: Numbers
    first: Numbers
    """Index of the sequence's first item."""
    parts: Numbers
    """Items of the sequence."""


def split_keys(lengths: Numbers, room: Room, window: int | None) -> Items:
    """Split sequences' keys into parts, at most room.spare more than sequences.

    lengths: int64 [sequences], each sequence's keys, at least 1. window: the number of newest keys that are split; None:
    all. Without a window, and with sequences for one wave at most, parts depend on how many smallest parts the lengths take,
    rounded up, but for the ends of the sequences' last parts.
    """
    wanted = lengths if window is None else np.minimum(lengths, window)
    seen = _rounded(wanted, room.smallest) if window is None else wanted
    parts, own = _parts(seen, _part_length(wanted, seen, room), room.smallest)
    begins = np.maximum(lengths - seen, 0)
    if int(parts.sum()) == len(parts):
        places = np.arange(len(parts))
        return Items(places, begins, np.minimum(begins + own, lengths), places, parts)
    firsts = parts.cumsum() - parts
    sequence = np.repeat(np.arange(len(seen)), parts)
    first = firsts[sequence]
    begin = begins[sequence] + (np.arange(len(sequence)) - first) * own[sequence]
    end = np.minimum(begin + own[sequence], lengths[sequence])
    return Items(sequence, begin, end, first, parts[sequence])


def _part_length(wanted: Numbers, seen: Numbers, room: Room) -> int:
    """The longest part that a sequence should have, a multiple of room.smallest.

    wanted: the keys of each sequence; seen: these, or rounded up.
    """
    if room.spare == 0:
        return int(seen.max())
    if len(seen) > room.filled * room.wave:
        # Only a sequence that is much longer than the others is worth being split.
        return max(room.smallest, _rounded(-(-int(wanted.sum()) // room.spare), room.smallest))
    return _filling_length((-(-seen // room.smallest)).tobytes(), room)


# Finding it takes longer than all else of a layout, and steps that follow one another often ask for the same.
@lru_cache(maxsize=64)
def _filling_length(units: bytes, room: Room) -> int:
    """The length of parts with which all items together fill whole waves of thread blocks.

    units: int64 [sequences], the keys of each sequence in smallest parts, rounded up. The time of a wave is that of its
    longest item.
    """
    numbers = np.frombuffer(units, np.int64).tolist()
    # Sequences of one length, as the tokens of a check mostly have, are looked at together.
    lengths = list(Counter(numbers).items())
    count, total, longest = len(numbers), sum(numbers), max(numbers)
    if total <= min(room.wave, count + room.spare):
        return room.smallest  # parts cannot be shorter, and all of them are in one wave
    best, least, before = 1, math.inf, 0
    for waves in range(-(-count // room.wave), _MOST_WAVES + 1):
        limit = min(waves * room.wave, count + room.spare)
        # No parts are shorter than an equal share of all keys.
        if limit > before and waves * (total / limit + 1) < least:
            length = _least_length(lengths, limit, total, longest)
            cost = waves * (max(_units_of_part(own, length) for own, _ in lengths) + 1)
            if cost < least:
                best, least = length, cost
        before = limit
    return best * room.smallest


def _least_length(lengths: list[tuple[int, int]], limit: int, total: int, longest: int) -> int:
    """The shortest part with which there are at most limit items, in smallest parts as all lengths here.

    lengths: pairs of a length and how many sequences have it.
    """
    # Items become fewer as parts become longer, and they are at least total / (1.25 * length). The answer is mostly close to
    # what that allows.
    low, high = max(1, 4 * total // (5 * limit)), max(1, longest)
    stride = 1
    while low < high:
        middle = min(low + stride - 1, (low + high) // 2)
        if sum([number * -(-own // _units_of_part(own, middle)) for own, number in lengths]) <= limit:
            high = middle
        else:
            low = middle + 1
        stride *= 2
    return low


def _units_of_part(length: int, most: int) -> int:
    """What _parts() says of a sequence's parts, for lengths in smallest parts."""
    return length if 4 * length <= 5 * most else -(-length // -(-length // most))


def _parts(seen: Numbers, most: int, smallest: int) -> tuple[Numbers, Numbers]:
    """How many parts each sequence has and how many keys each of its parts, where parts should have at most `most` keys."""
    # A sequence is split only if it is longer than a part by more than a quarter.
    is_split = 4 * seen > 5 * most
    if not is_split.any():
        return np.ones_like(seen), seen
    own = np.where(is_split, _rounded(-(-seen // -(-seen // most)), smallest), seen)
    return -(-seen // own), own


_Count = TypeVar("_Count", int, Numbers)


def _rounded(count: _Count, smallest: int) -> _Count:
    return -(-count // smallest) * smallest
