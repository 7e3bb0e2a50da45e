"""The attention of decode steps by our own kernels, and how a step is laid out for them.

FlashInfer takes two launches for such a step, and a third one writes the new keys and values. With few sequences these
launches are bound by latency alone; our kernels do all of it in one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from nf4_kernels.cuda import decode_attention as kernel
from nf4_kernels.cuda.decode_attention import Instance, Layout
from server.engine.runtime.attention.base import AttentionOptions, result_shape
from server.engine.runtime.attention.kernels.decode.compiled_kernel import Rooms
from server.engine.runtime.attention.kernels.decode.key_parts import SMALLEST_PART, Numbers, Room, split_keys
from server.engine.runtime.attention.kernels.device_tables import DeviceTables
from server.engine.runtime.attention.kernels.instances import Shared
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.batch import Spans, pinned

HEADER = 8
FIELDS = 8
# Sequences of the trial's steps, and KV blocks that each may have.
TRIAL_SEQUENCES, TRIAL_BLOCKS = 3, 2 * SMALLEST_PART + 3


def layout(
    lengths: Numbers,
    rows: Numbers,
    windows: Sequence[int | None],
    rooms: Sequence[Room],
    sequences: int | None = None,
) -> npt.NDArray[np.int32]:
    """A step of one-token sequences as the kernel reads it: a header, and each window's items; int32.

    lengths: int64 [sequences], each sequence's keys; rows: its row of the block tables. The header says how many items
    each window has. Each window has room for its room's spare items more than there are sequences, but for the last one,
    whose room ends with its items. An item is a part of a sequence's keys: sequence, first key, key behind the last,
    newest key, the sequence's first item, its number of items, its row of the block tables, tokens_before(). sequences: how
    many the launch makes room for, by default those that there are.
    """
    if not len(lengths):
        return np.zeros(HEADER, np.int32)
    found = [split_keys(lengths, room, window) for window, room in zip(windows, rooms, strict=True)]
    before = tokens_before(lengths, rows)
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
        if before is not None:
            columns[:, 7] = before[sequence]
    return numbers


def tokens_before(lengths: Numbers, rows: Numbers) -> Numbers | None:
    """For each of a step's tokens, how many of the same sequence are right in front of it; None: there are none.

    lengths, rows: as of layout(). Tokens of padding have a row in common, and no earlier keys.
    """
    follows = (rows[1:] == rows[:-1]) & (lengths[1:] > 1)
    if not follows.any():
        return None
    places = np.arange(len(rows))
    begins = places.copy()
    begins[1:][follows] = 0
    before: Numbers = places - np.maximum.accumulate(begins)
    return before


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
        compiled: Collection[Kind] = (),
    ) -> None:
        """kinds: the layers'. largest: sequences that a step may have; most_blocks: KV blocks that each may have.

        scratch_block: the KV block of padding. split: whether a sequence's keys may be split into parts. compiled: the kinds
        that nf4_kernels' kernel may attend for (compiled_kernel.can_attend()). It does where it may for all of a window's.
        """
        # Triton is not installed without CUDA.
        from server.engine.runtime.attention.kernels.advance_kernel import advance
        from server.engine.runtime.attention.kernels.decode.triton_kernel import Partials, attend_newest

        self._attend: Callable[..., torch.Tensor] = attend_newest
        self._advance: Callable[..., None] = advance
        windows = list(dict.fromkeys(kind.options.window for kind in kinds))
        if len(windows) > HEADER:
            raise ValueError(f"layers have {len(windows)} different windows")
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        of_windows = [[kind for kind in kinds if kind.options.window == window] for window in windows]
        self._rooms = Rooms(
            processors,
            [max(kind.groups for kind in own) for own in of_windows],
            [all(kind in compiled for kind in own) for own in of_windows],
            split,
            any(kind.is_latent for kind in kinds),
        )
        sequences = max(largest, TRIAL_SEQUENCES)
        self._windows = windows
        items = sequences + self._rooms.most_spare
        self._numbers = torch.zeros(HEADER + len(windows) * items * FIELDS, dtype=torch.int32, device=device)
        self.tables = DeviceTables(sequences, max(most_blocks, TRIAL_BLOCKS), scratch_block, device)
        self._partials = Partials(
            items,
            max(kind.groups for kind in kinds),
            max(kind.heads for kind in kinds),
            max(kind.value_dim for kind in kinds),
            device,
        )

    @property
    def room(self) -> tuple[int, int]:
        """Sequences that a step may have, and KV blocks that each may have."""
        return self.tables.padding_row, self.tables.blocks.shape[1]

    def forms(self, kind: Kind) -> list[Instance | None]:
        """The forms by which the kernel attends for layers of a kind, as in_form() takes them."""
        return self._rooms.forms(self._windows.index(kind.options.window))

    @contextmanager
    def in_form(self, form: Instance | None) -> Iterator[None]:
        """Attend by one form whatever the step's sequences, while entered; None: by what an engine takes."""
        self._rooms.form = form
        try:
            yield
        finally:
            self._rooms.form = None

    def plan(self, spans: Spans, size: int, shared: bool = False) -> None:
        """Lay out a step for the graph of size sequences; those beyond spans are padding, a token each.

        shared: as attend() was told.
        """
        lengths, rows = np.ones(size, np.int64), np.full(size, self.tables.padding_row)
        lengths[: len(spans)], rows[: len(spans)] = spans.ends, spans.rows
        self._put(layout(lengths, rows, self._windows, self._rooms.of(size, shared)), spans)

    def advance(self, inputs: torch.Tensor, tokens: torch.Tensor, block_size: int) -> bool:
        """Lay out the step behind the one that plan() or this has laid out, see GraphBackend.advance_decode_graph()."""
        if self._windows != [None]:
            return False  # a window's first key would move, too
        items = inputs.shape[1] + self._rooms.most_spare
        self._advance(self._numbers, HEADER, FIELDS, items, inputs, tokens, self.tables.blocks, block_size)
        return True

    def plan_singles(self, spans: Spans, singles: int, sequences: int) -> None:
        """Lay out a step's first `singles` spans, one token each, for a launch that has room for `sequences` sequences."""
        rooms = self._rooms.of(sequences, False)
        numbers = layout(spans.ends[:singles], spans.rows[:singles], self._windows, rooms, sequences)
        self._put(numbers, spans)

    def _put(self, numbers: npt.NDArray[np.int32], spans: Spans) -> None:
        self._numbers[: len(numbers)].copy_(pinned(numbers, self._numbers.device), non_blocking=True)
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
        shared: Shared = Shared.NO,
    ) -> torch.Tensor:
        """Write the step's keys and values into a layer's cache and attend, see triton_kernel.attend_newest().

        sequences: what plan_singles() was told; None after plan().
        """
        room_for = query.shape[0] if sequences is None else sequences
        is_shared = shared is not Shared.NO
        rooms, window = self._rooms.of(room_for, is_shared), self._windows.index(options.window)
        first, items = item_places(room_for, rooms)[window], room_for + rooms[window].spare
        instance = self._rooms.instance(window, room_for, is_shared)
        if instance is not None:
            tokens, heads, dim = query.shape
            if out is None:
                out = query.new_empty(result_shape(tokens, heads, dim, tile))
            given = Layout(self._numbers, window, first, items, self.tables.blocks)
            kernel.decode_attention(
                cache.data, query, key, value, out, given, self._partials, instance, options.scaling, rotary, tile
            )
            return out
        step = self._numbers, first, window, items, self.tables.blocks
        return self._attend(cache, query, key, value, *step, self._partials, options, rotary, tile, sinks, out, shared)
