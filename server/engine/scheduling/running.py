"""The running sequences, of which those that decode are kept in columns from one step to the next."""

from __future__ import annotations

from itertools import compress

import numpy as np

from server.engine.scheduling.block_tables import BlockTables
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.columns import DecodeColumns, Decoding, Departed
from server.engine.scheduling.sequence import Phase, Sequence
from server.engine.scheduling.step import Step

COLUMNS_FROM = 16
"""With fewer sequences, a look at each takes less time than numpy's calls."""


class RunningSequences:
    """Running sequences, oldest first.

    A sequence joins the columns when it has got its first token, and leaves them when it stops running or has no more
    tokens to compute. Those that are not in the columns are few, unless a lot of prompts are prefilled.
    """

    def __init__(self) -> None:
        self.all: list[Sequence] = []
        self._others: list[Sequence] = []
        self._columns: DecodeColumns | None = None
        self._departed = Departed(0, 0)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def num_preemptions(self) -> int:
        """Number of preempted sequences."""
        return self._departed.preempted

    def add(self, sequence: Sequence) -> None:
        """Take a sequence that has been admitted."""
        self.all.append(sequence)
        self._others.append(sequence)

    def remove(self, sequence: Sequence, preempted: bool = False) -> None:
        """Forget a sequence, which ends or is preempted."""
        self.all.remove(sequence)
        if sequence in self._others:
            self._others.remove(sequence)
        ended, preemptions = self._departed
        self._departed = Departed(ended + (not preempted), preemptions + preempted)
        if preempted:
            # What comes back runs in another row of the block tables.
            self._look_at_each()

    def decoding(self, blocks: BlockManager, tables: BlockTables) -> tuple[Decoding | None, list[Sequence]]:
        """One token of each sequence in the columns, with the KV blocks for it, and the sequences beside them.

        None and all sequences where so few are in the columns, or so few KV blocks free, that each has to be looked at.
        """
        if len(self.all) < COLUMNS_FROM:
            self._look_at_each()
            return None, self.all
        decoding = self._decoding()
        if len(decoding) < COLUMNS_FROM or not decoding.take_blocks(blocks, tables):
            return None, self.all
        return decoding, self._others

    def still_running(self, decoding: Decoding | None) -> Decoding | None:
        """The part of a step's decoding whose sequences have not ended; None where one was preempted since."""
        if decoding is None or decoding.columns.departed.preempted != self._departed.preempted:
            return None
        return decoding.still_running(self._departed)

    def alive(self, step: Step) -> Step:
        """A step without the sequences that have ended since it was scheduled."""
        finished, decoding = Phase.FINISHED, self.still_running(step.decoding)
        chunks = step.chunks if decoding is None else step.others
        others = [chunk for chunk in chunks if chunk.sequence.phase is not finished]
        if decoding is step.decoding and len(others) == len(chunks):
            return step
        return Step(others, decoding=decoding)

    def is_whole(self, decoding: Decoding) -> bool:
        """Whether all sequences of a step's decoding are known to run, as they did when it was scheduled."""
        return decoding.columns.departed == self._departed

    def _look_at_each(self) -> None:
        self._columns, self._others = None, [*self.all]

    def _decoding(self) -> Decoding:
        """One token of each sequence in the columns, which sequences join and leave here."""
        columns = self._columns
        if columns is None:
            columns = DecodeColumns.of([], self._departed)
        else:
            _, columns = columns.still_running(self._departed)
        if joining := [sequence for sequence in self._others if _decodes(sequence)]:
            self._others = [sequence for sequence in self._others if not _decodes(sequence)]
            columns = columns.with_others(joining)
        counts = np.fromiter(map(len, columns.tokens), np.int64, len(columns))
        starts = np.array([sequence.num_computed for sequence in columns.sequences], np.int64)
        fits = (counts == starts + 1) & (starts >= columns.prompts) & (counts < columns.max_lengths)
        if not fits.all():
            self._others += compress(columns.sequences, (~fits).tolist())
            columns, starts = columns.where(fits.tolist()), starts[fits]
        self._columns = columns
        return Decoding(columns, starts)


def _decodes(sequence: Sequence) -> bool:
    """Whether a sequence has one token to compute, which it has generated, and another one follows it."""
    count = len(sequence.tokens)
    return sequence.num_prompt <= sequence.num_computed == count - 1 < sequence.max_length - 1
