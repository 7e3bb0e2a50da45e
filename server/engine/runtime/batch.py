"""One forward pass as tensors: the chunks of a step, flattened into one row of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from server.engine.runtime.image_rows import ImageRows
from server.engine.runtime.step_input import StepInput
from server.engine.scheduling.block_tables import BlockTables


@dataclass(frozen=True)
class Span:
    """One sequence in a batch: rows [row, row + length) of the batch are its tokens [start, start + length)."""

    row: int
    start: int
    length: int
    blocks: Sequence[int] | npt.NDArray[np.int32]
    """Cache blocks that hold its tokens [0, start + length)."""
    adapter: int | None = None
    """The slot of its LoRA adapter, if it has one."""

    @property
    def end(self) -> int:
        """Tokens in the cache once the batch has been computed."""
        return self.start + self.length


class Spans:
    """The S sequences of a batch in columns; a step of thousands of KV blocks touches no block that it does not need.

    Iteration and indexing make Span objects, whose blocks are views of the tables.
    """

    def __init__(
        self,
        tables: BlockTables,
        rows: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        adapters: Sequence[int | None],
    ) -> None:
        self.tables = tables
        self.rows = rows
        """int64 [S]: each sequence's row of the tables; sequences may share one."""
        self.starts = starts
        """int64 [S]: the first token of each sequence that the batch computes."""
        self.lengths = lengths
        """int64 [S]: how many tokens of each sequence the batch computes."""
        self.counts = counts
        """int64 [S]: KV blocks of each sequence's tokens up to its end."""
        self.adapters = adapters
        """[S]: the slots of the sequences' LoRA adapters."""

    @classmethod
    def of(cls, spans: Iterable[Span], rows: Sequence[int] | None = None) -> Spans:
        """Spans of which each follows the one before, with block tables of their own, whose rows are 0, 1, ... or rows."""
        spans = list(spans)
        rows = range(len(spans)) if rows is None else rows
        counts = np.array([len(span.blocks) for span in spans], np.int64)
        tables = BlockTables(len(spans), int(counts.max(initial=0)))
        for _, span in sorted(zip(rows, spans, strict=True), key=lambda pair: pair[0]):
            tables.take(list(span.blocks))
        return cls(
            tables,
            np.array(rows, np.int64),
            np.array([span.start for span in spans], np.int64),
            np.array([span.length for span in spans], np.int64),
            counts,
            [span.adapter for span in spans],
        )

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """int64 [S]: tokens of each sequence in the cache once the batch has been computed."""
        return self.starts + self.lengths

    @cached_property
    def first_rows(self) -> npt.NDArray[np.int64]:
        """int64 [S]: the batch's row of each sequence's first token."""
        rows: npt.NDArray[np.int64] = self.lengths.cumsum() - self.lengths
        return rows

    @property
    def adapted(self) -> bool:
        """Whether any sequence has a LoRA adapter."""
        return self.adapters.count(None) < len(self.adapters)

    def blocks_of(self, index: int) -> npt.NDArray[np.int32]:
        """A sequence's blocks, a view of the tables."""
        return self.tables.blocks[self.rows[index], : self.counts[index]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Span:
        return Span(
            int(self.first_rows[index]),
            int(self.starts[index]),
            int(self.lengths[index]),
            self.blocks_of(index),
            self.adapters[index],
        )

    def __iter__(self) -> Iterator[Span]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True)
class Batch:
    """T tokens of all sequences of a step. The first num_single spans are one token each.

    ids, positions, slots: int64 [T]; a slot is block * block_size + offset. sampled_rows: int64, the rows whose logits
    are wanted: first those that tokens are sampled from, then those of prompt tokens that are scored. A token's position
    is what its rotary embedding is made from: its place in the sequence, unless an image stands in front of it. All four are
    on one device, or in host memory, as graphs take them.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sampled_rows: torch.Tensor
    spans: Spans
    num_single: int
    images: ImageRows | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.ids.shape[0]

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on a device; the host does not wait for it."""
        if self.ids.device.type == device.type:
            return self
        # One transfer for everything.
        given = (self.ids, self.positions, self.slots, self.sampled_rows)
        table = to_device(torch.cat(given).numpy(), device)
        ids, positions, slots, rows = table.split([len(own) for own in given])
        return replace(self, ids=ids, positions=positions, slots=slots, sampled_rows=rows)


def to_device(numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """numbers on a device; the host does not wait for it."""
    return pinned(numbers, device).to(device, non_blocking=True)


def pinned(numbers: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """numbers in pinned memory for a GPU: from other memory a copy to it would wait for the step that is running."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory() if device.type == "cuda" else tensor


class ToHost:
    """A tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy, self._done = tensor, None
        if tensor.is_cuda:
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> torch.Tensor:
        """The tensor in host memory, once it is there."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy


def batch_of(given: StepInput, block_size: int) -> Batch:
    """The batch that computes a step, in host memory; its chunks of one token come first.

    All sequences hold a row of the tables.
    """
    tables, table_rows, starts, lengths = given.tables, given.rows, given.starts, given.lengths
    counts = -(-(starts + lengths) // block_size)
    spans = Spans(tables, table_rows, starts, lengths, counts, given.adapters)
    num_single, count = int((lengths == 1).sum()), len(given.ids)
    places = starts
    if num_single < len(starts):
        places = np.repeat(starts - spans.first_rows, lengths) + np.arange(count)
        table_rows = np.repeat(table_rows, lengths)
    slots = tables.blocks[table_rows, places // block_size] * np.int64(block_size) + places % block_size
    positions = places if given.offsets is None else places + np.repeat(given.offsets, lengths)
    ids, rows = torch.from_numpy(np.array(given.ids, np.int64)), torch.from_numpy(given.wanted)
    places_and_slots = torch.from_numpy(positions), torch.from_numpy(slots)
    return Batch(ids, *places_and_slots, rows, spans, num_single, given.images)
