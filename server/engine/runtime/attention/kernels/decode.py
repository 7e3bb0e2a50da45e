"""The attention of decode steps by our own kernel: which keys of which sequence each of its thread blocks reads.

FlashInfer takes two launches for such a step, and a third one writes the new keys and values. With few sequences these
launches are bound by latency alone; our kernel does all of it in one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from server.engine.runtime.attention.base import PLANS_AHEAD, AttentionOptions
from server.engine.runtime.attention.kernels.device_tables import DeviceTables
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.batch import Spans

SMALLEST_PART = 64
"""A sequence's keys are split into parts of at least this many: reducing more parts would take longer than it saves.

The number of a part's keys is a multiple of it, except in a sequence's last part.
"""
_PROGRAMS_PER_PROCESSOR = 4
"""Thread blocks of the kernel that a multiprocessor runs at a time."""
_MOST_WAVES = 4
HEADER = 8
FIELDS = 8
# Sequences of decode_trial's steps, and KV blocks that each may have.
TRIAL_SEQUENCES, TRIAL_BLOCKS = 3, 2 * SMALLEST_PART + 3

_Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Room:
    """How many items a launch has thread blocks for."""

    wave: int
    """The items of a wave: those that the device runs at a time."""
    spare: int
    """The items that there may be beyond one for each sequence; 0: no sequence's keys are split."""

    @classmethod
    def of(cls, processors: int, kv_heads: int) -> Room:
        """The room on a device with `processors` multiprocessors; every item has a thread block for each of kv_heads."""
        programs = _PROGRAMS_PER_PROCESSOR * processors
        return cls(max(1, programs // kv_heads), -(-programs // kv_heads))


@dataclass(frozen=True)
class Items:
    """Parts of sequences' keys, in columns of int64 [items]; a sequence's parts follow one another."""

    sequence: _Numbers
    begin: _Numbers
    end: _Numbers
    first: _Numbers
    """Index of the sequence's first item."""
    parts: _Numbers
    """Items of the sequence."""


def split_keys(lengths: _Numbers, room: Room, window: int | None) -> Items:
    """Split sequences' keys into parts, at most room.spare more than sequences.

    lengths: int64 [sequences], each sequence's keys, at least 1. window: the number of newest keys that are split; None:
    all.
    """
    seen = lengths if window is None else np.minimum(lengths, window)
    parts, own = _parts(seen, _part_length(seen, room))
    firsts = parts.cumsum() - parts
    sequence = np.repeat(np.arange(len(seen)), parts)
    first = firsts[sequence]
    begin = (lengths - seen)[sequence] + (np.arange(len(sequence)) - first) * own[sequence]
    end = np.minimum(begin + own[sequence], lengths[sequence])
    return Items(sequence, begin, end, first, parts[sequence])


def _part_length(seen: _Numbers, room: Room) -> int:
    """The longest part that a sequence should have, a multiple of SMALLEST_PART; seen: the keys of each sequence."""
    if room.spare == 0:
        return int(seen.max())
    if len(seen) > room.wave:
        # Only a sequence that is much longer than the others is worth being split.
        return max(SMALLEST_PART, _rounded(-(-int(seen.sum()) // room.spare)))
    return _filling_length((-(-seen // SMALLEST_PART)).tobytes(), room)


# Finding it takes longer than all else of a layout, and steps that follow one another often ask for the same.
@lru_cache(maxsize=64)
def _filling_length(units: bytes, room: Room) -> int:
    """The length of parts with which all items together fill whole waves of thread blocks.

    units: int64 [sequences], the keys of each sequence in SMALLEST_PARTs, rounded up. The time of a wave is that of its
    longest item.
    """
    numbers = np.frombuffer(units, np.int64).tolist()
    # Sequences of one length, as the tokens of a check mostly have, are looked at together.
    lengths = list(Counter(numbers).items())
    count, total, longest = len(numbers), sum(numbers), max(numbers)
    if total <= min(room.wave, count + room.spare):
        return SMALLEST_PART  # parts cannot be shorter, and all of them are in one wave
    best, least, before = 1, math.inf, 0
    for waves in range(1, _MOST_WAVES + 1):
        limit = min(waves * room.wave, count + room.spare)
        # No parts are shorter than an equal share of all keys.
        if limit > before and waves * (total / limit + 1) < least:
            length = _least_length(lengths, limit, total, longest)
            cost = waves * (max(_units_of_part(own, length) for own, _ in lengths) + 1)
            if cost < least:
                best, least = length, cost
        before = limit
    return best * SMALLEST_PART


def _least_length(lengths: list[tuple[int, int]], limit: int, total: int, longest: int) -> int:
    """The shortest part with which there are at most limit items, in SMALLEST_PARTs as all lengths here.

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
    """What _parts() says of a sequence's parts, for lengths in SMALLEST_PARTs."""
    return length if 4 * length <= 5 * most else -(-length // -(-length // most))


def _parts(seen: _Numbers, most: int) -> tuple[_Numbers, _Numbers]:
    """How many parts each sequence has and how many keys each of its parts, where parts should have at most `most` keys."""
    # A sequence is split only if it is longer than a part by more than a quarter.
    own = np.where(4 * seen > 5 * most, _rounded(-(-seen // -(-seen // most))), seen)
    return -(-seen // own), own


_Count = TypeVar("_Count", int, _Numbers)


def _rounded(count: _Count) -> _Count:
    return -(-count // SMALLEST_PART) * SMALLEST_PART


def layout(
    lengths: _Numbers,
    rows: _Numbers,
    windows: Sequence[int | None],
    rooms: Sequence[Room],
    sequences: int | None = None,
) -> npt.NDArray[np.int32]:
    """A step of one-token sequences as the kernel reads it: a header, and each window's items; int32.

    lengths: int64 [sequences], each sequence's keys; rows: its row of the block tables. The header says how many items
    each window has. Each window has room for its room's spare items more than there are sequences, but for the last one,
    whose room ends with its items. An item is a part of a sequence's keys: sequence, first key, key behind the last,
    newest key, the sequence's first item, its number of items, its row of the block tables, 0. sequences: how many the
    launch makes room for, by default those that there are.
    """
    if not len(lengths):
        return np.zeros(HEADER, np.int32)
    found = [split_keys(lengths, room, window) for window, room in zip(windows, rooms, strict=True)]
    places = item_places(len(lengths) if sequences is None else sequences, rooms)
    numbers = np.zeros(places[-1] + len(found[-1].parts) * FIELDS, np.int32)
    for window, (place, items) in enumerate(zip(places, found, strict=True)):
        count, sequence = len(items.parts), items.sequence
        numbers[window] = count
        columns = numbers[place : place + count * FIELDS].reshape(count, FIELDS)
        columns[:, 0] = sequence
        columns[:, 1] = items.begin
        columns[:, 2] = items.end
        columns[:, 3] = lengths[sequence] - 1
        columns[:, 4] = items.first
        columns[:, 5] = items.parts
        columns[:, 6] = rows[sequence]
    return numbers


def item_places(sequences: int, rooms: Sequence[Room]) -> list[int]:
    """Say where each window's items begin in the layout of a step that has room for `sequences` sequences."""
    sizes = [(sequences + room.spare) * FIELDS for room in rooms]
    return [HEADER + sum(sizes[:window]) for window in range(len(sizes))]


class DecodeAttention:
    """Attention of one new token for each sequence in CUDA graphs, whose tables always lie in the same memory."""

    def __init__(
        self,
        kinds: Collection[Kind],
        largest: int,
        most_blocks: int,
        scratch_block: int,
        device: torch.device,
        split: bool = True,
    ) -> None:
        """kinds: the layers'. largest: sequences that a step may have; most_blocks: KV blocks that each may have.

        scratch_block: the KV block of padding. split: whether a sequence's keys may be split into parts.
        """
        # Triton is not installed without CUDA.
        from server.engine.runtime.attention.kernels.advance_kernel import advance
        from server.engine.runtime.attention.kernels.decode_kernel import Partials, attend_newest

        self._attend: Callable[..., torch.Tensor] = attend_newest
        self._advance: Callable[..., None] = advance
        self._windows = list(dict.fromkeys(kind.options.window for kind in kinds))
        if len(self._windows) > HEADER:
            raise ValueError(f"layers have {len(self._windows)} different windows")
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        heads = [max(kind.kv_heads for kind in kinds if kind.options.window == window) for window in self._windows]
        found = [Room.of(processors, own) for own in heads]
        self._rooms = found if split else [Room(room.wave, 0) for room in found]
        sequences = max(largest, TRIAL_SEQUENCES)
        items = sequences + max(room.spare for room in self._rooms)
        self._numbers = torch.zeros(HEADER + len(self._windows) * items * FIELDS, dtype=torch.int32, device=device)
        # Taken in turn, so that a layout need not wait for the copies of the one before.
        self._pinned = [torch.empty_like(self._numbers, device="cpu", pin_memory=True) for _ in range(PLANS_AHEAD)]
        self.tables = DeviceTables(sequences, max(most_blocks, TRIAL_BLOCKS), scratch_block, device)
        self._partials = Partials(
            items,
            max(kind.kv_heads for kind in kinds),
            max(kind.heads for kind in kinds),
            max(kind.dim for kind in kinds),
            device,
        )

    def plan(self, spans: Spans, size: int) -> None:
        """Lay out a step for the graph of size sequences; those beyond spans are padding, a token each.

        The copies of the plan that is PLANS_AHEAD plans old must be over.
        """
        padding, lengths, rows = size - len(spans), spans.ends, spans.rows
        if padding:
            lengths = np.append(lengths, np.ones(padding, np.int64))
            rows = np.append(rows, np.full(padding, self.tables.padding_row))
        numbers = layout(lengths, rows, self._windows, self._rooms)
        count = len(numbers)
        pinned = self._pinned.pop(0)
        self._pinned.append(pinned)
        pinned.numpy()[:count] = numbers
        self._numbers[:count].copy_(pinned[:count], non_blocking=True)
        self.tables.update(spans)

    def advance(
        self, inputs: torch.Tensor, tokens: torch.Tensor, block_size: int, shifts: torch.Tensor | None = None
    ) -> bool:
        """Lay out the step behind the one that plan() or this has laid out, see GraphBackend.advance_decode_graph()."""
        if self._windows != [None]:
            return False  # a window's first key would move, too
        items = inputs.shape[1] + self._rooms[0].spare
        self._advance(self._numbers, HEADER, FIELDS, items, inputs, tokens, self.tables.blocks, block_size, shifts)
        return True

    def plan_singles(self, spans: Spans, singles: int, sequences: int) -> None:
        """Lay out a step's first `singles` spans, one token each, for a launch that has room for `sequences` sequences."""
        numbers = layout(spans.ends[:singles], spans.rows[:singles], self._windows, self._rooms, sequences)
        # A copy from memory that is not pinned would wait for the step that is running.
        self._numbers[: len(numbers)].copy_(torch.from_numpy(numbers).pin_memory(), non_blocking=True)
        self.tables.update(spans)

    def attend(
        self,
        cache: LayerCache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        rotary: RotaryEmbedding | None = None,
        tile: int = 0,
        sinks: torch.Tensor | None = None,
        sequences: int | None = None,
        out: torch.Tensor | None = None,
        written: bool = False,
    ) -> torch.Tensor:
        """Write the step's keys and values into a layer's cache and attend, see decode_kernel.attend_newest().

        sequences: what plan_singles() was told; None after plan(). written: the keys and values have been written already.
        """
        window, room_for = self._windows.index(options.window), query.shape[0] if sequences is None else sequences
        first = item_places(room_for, self._rooms)[window]
        step = self._numbers, first, window, room_for + self._rooms[window].spare, self.tables.blocks
        return self._attend(cache, query, key, value, *step, self._partials, options, rotary, tile, sinks, out, written)
