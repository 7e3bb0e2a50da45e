"""Penalties: which tokens each penalized sequence has, and how often, in a table on the device.

The newest token is counted there, so that the host need not know it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from server.engine.runtime.batch import to_device
from server.engine.runtime.sampling.ops import ops_on
from server.engine.scheduling.sequence import Sequence

_FIRST_ROWS = 8


@dataclass(frozen=True)
class PenalizedRows:
    """N penalized sequences of a step."""

    sequences: list[Sequence]
    rows: npt.NDArray[np.int64]
    """int64 [N]: their rows of the table."""
    rows_on_device: torch.Tensor
    prompts: npt.NDArray[np.int64]
    """int64 [N]: tokens of their prompts."""
    penalties: torch.Tensor
    """float32 [N, 3] on the device: repetition, presence and frequency penalty."""


class PenaltyTable:
    """Tokens of each penalized sequence, and their counts: a row of a table on the device until the sequence is gone.

    A row takes 4 bytes for each token of the vocabulary. Rows are added as they are needed, and used again.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._rows: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()
        self._free: list[int] = []
        self._known: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        # By row, how many of its sequence's tokens are counted.
        self.counts = torch.zeros(0, vocabulary, dtype=torch.int32, device=device)
        """int32 [rows, vocabulary]: twice how often the token is in the answer, and 1 if it is there or in the prompt."""

    def rows_of(self, sequences: list[Sequence]) -> PenalizedRows:
        """Rows of the table that are these sequences'; valid as long as they live."""
        given = [s.sampling for s in sequences]
        asked = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in given]
        rows = np.array([self._row(sequence) for sequence in sequences], np.int64)
        prompts = np.array([sequence.num_prompt for sequence in sequences], np.int64)
        device = self.counts.device
        penalties = to_device(np.array(asked, np.float32), device)
        return PenalizedRows(sequences, rows, to_device(rows, device), prompts, penalties)

    def penalize(
        self, logits: torch.Tensor, rows: torch.Tensor, penalized: PenalizedRows, newest: torch.Tensor | None
    ) -> torch.Tensor:
        """Count what is new of N sequences' tokens; their penalized logits, float32 [N, vocabulary].

        logits [S, vocabulary]; rows: int64 [N], the sequences' rows there. newest: int64 [S], each row's newest token,
        where the host need not know them; None: it knows all tokens.
        """
        lengths = np.array([sequence.num_tokens for sequence in penalized.sequences], np.int64)
        # The last token of a prompt is not in the answer, and the host knows it.
        left = (self._known[penalized.rows] < lengths) & (lengths > penalized.prompts) & (newest is not None)
        self._count(penalized.sequences, penalized.rows, lengths - left)
        if newest is None:
            own = torch.full_like(rows, -1)
        else:
            own = newest.index_select(0, rows)
            if not left.all():
                own = own.masked_fill(to_device(~left, rows.device), -1)
        out = torch.empty(len(rows), logits.shape[1], device=logits.device)
        ops_on(logits.device).penalize_rows(
            logits, rows, penalized.penalties, self.counts, penalized.rows_on_device, own, out
        )
        self._known[penalized.rows] = lengths
        return out

    def _count(self, sequences: list[Sequence], rows: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        """Count tokens that the host knows, up to these ends."""
        vocabulary, places, amounts = self.counts.shape[1], [], []
        for index in np.flatnonzero(self._known[rows] < ends).tolist():
            sequence, row, end = sequences[index], int(rows[index]), int(ends[index])
            known = int(self._known[row])
            # Draft tokens are behind all others, which are counted already.
            new = sequence.tokens[known:end] if sequence.original is None else sequence.draft_tokens[: end - known]
            different, which = np.unique(np.array(new, np.int64), return_inverse=True)
            generated = np.arange(known, end) >= sequence.num_prompt
            places.append(row * vocabulary + different)
            amounts.append(2 * np.bincount(which, generated).astype(np.int64))
        if places:
            at, amount = to_device(np.stack((np.concatenate(places), np.concatenate(amounts))), self.counts.device)
            counts = self.counts.view(-1)
            counts[at] = (counts[at] + amount.int()) | 1
        self._known[rows] = ends

    def _row(self, sequence: Sequence) -> int:
        row = self._rows.get(sequence)
        if row is None:
            if not self._free:
                self._grow()
            row = self._rows[sequence] = self._free.pop()
            weakref.finalize(sequence, self._free.append, row).atexit = False
            if sequence.original is None:
                self.counts[row], self._known[row] = 0, 0
            else:
                known = np.array([self._row(sequence.original)], np.int64)
                self._count([sequence.original], known, np.array([sequence.original.num_tokens], np.int64))
                self.counts[row], self._known[row] = self.counts[known[0]], self._known[known[0]]
        return row

    def _grow(self) -> None:
        count = self.counts.shape[0]
        more = max(count, _FIRST_ROWS)
        self.counts = torch.cat([self.counts, self.counts.new_zeros(more, self.counts.shape[1])])
        self._known = np.append(self._known, np.zeros(more, np.int64))
        self._free += range(count + more - 1, count - 1, -1)
