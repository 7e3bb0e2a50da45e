"""Input of a forward pass: a step's chunks in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from server.engine.runtime.image_rows import ImageRows, image_rows
from server.engine.scheduling.block_tables import BlockTables
from server.engine.scheduling.step import Step

Copies = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class StepInput:
    """All that a forward pass is made from: a step's chunks in columns, those of one token first."""

    tables: BlockTables
    rows: npt.NDArray[np.int64]
    """[S]: each sequence's row of the tables."""
    starts: npt.NDArray[np.int64]
    """[S]: the first token of each chunk."""
    lengths: npt.NDArray[np.int64]
    """[S]: tokens of each chunk."""
    ids: list[int]
    """[T]: the chunks' tokens, one chunk after another."""
    wanted: npt.NDArray[np.int64]
    """The tokens whose logits are wanted: first those that are sampled from, then prompt tokens that are scored."""
    adapters: Sequence[int | None]
    """[S]: the slots of the sequences' LoRA adapters."""
    offsets: npt.NDArray[np.int64] | None = None
    """[S]: what is added to the places of a chunk's tokens to get their positions; None where that is 0 in all chunks."""
    images: ImageRows | None = None
    hidden: bool = False
    """Whether final hidden states are wanted in the place of logits."""
    restored: Copies = ()
    """Slots of states to copy before the step: from a snapshot to a sequence, from one with draft tokens to its backup."""
    saved: Copies = ()
    """Slots of states to copy after the step: from a sequence, to a snapshot."""


def step_input(step: Step) -> StepInput:
    """The columns that compute a step, all of whose sequences hold a row of the block tables."""
    chunks = step.chunks
    sequences = [chunk.sequence for chunk in chunks]
    tables = sequences[0].tables
    assert tables is not None
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    lengths = np.array([chunk.length for chunk in chunks], np.int64)
    table_rows = np.array([sequence.row for sequence in sequences], np.int64)
    num_single = int((lengths == 1).sum())
    ids: list[int] = [s.tokens[start] for s, start in zip(sequences[:num_single], starts.tolist(), strict=False)]
    for chunk in chunks[num_single:]:
        ids += chunk.token_ids
    ends = lengths.cumsum()
    counts = np.array([chunk.num_sampled for chunk in chunks], np.int64)
    # The last rows of each chunk, so many as tokens are sampled.
    wanted = np.arange(counts.sum()) + np.repeat(ends - counts.cumsum(), counts)
    if any(sequence.sampling.prompt_logprobs is not None for sequence in sequences):
        scored: list[int] = []
        for row, chunk in zip((ends - lengths).tolist(), chunks, strict=True):
            scored.extend(row + position - chunk.start for position in chunk.scored)
        wanted = np.concatenate((wanted, np.array(scored, np.int64)))
    adapters = [sequence.adapter for sequence in sequences]
    offsets, images = None, None
    if any(sequence.images is not None for sequence in sequences):
        offsets = np.array([0 if s.images is None else s.images.offset for s in sequences], np.int64)
        images = image_rows(chunks, starts, lengths)
    kept = [(chunk.sequence.row, chunk.sequence.backup) for chunk in chunks if chunk.draft_tokens]
    copies = (
        [
            *((chunk.restored, chunk.sequence.row) for chunk in chunks if chunk.restored >= 0),
            *((row, backup) for row, backup in kept if backup >= 0),
        ],
        [(chunk.sequence.row, slot) for chunk in chunks for slot in chunk.saved],
    )
    return StepInput(tables, table_rows, starts, lengths, ids, wanted, adapters, offsets, images, False, *copies)
