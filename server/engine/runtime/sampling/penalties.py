"""Repetition, presence and frequency penalties.

The tokens that a sequence has had are counted once and kept; on a GPU one table holds them for all sequences.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field

import torch

from server.engine.scheduling.sequence import Sequence

# Sequences penalized at a time: intermediate results take a few times the memory of their logits.
_GROUP = 16
_FIRST_ROWS = 8


@functools.cache
def penalties(vocabulary: int, device: torch.device) -> Penalties | HostPenalties:
    """The penalties of a device, for models of this vocabulary."""
    return Penalties(vocabulary, device) if device.type == "cuda" else HostPenalties()


@dataclass
class _History:
    """How often a sequence has had each token; the first `known` of its tokens are counted."""

    known: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    """How often each token is in the answer; 0 for tokens that only the prompt has."""


class HostPenalties:
    """Penalizes one sequence after another, at the tokens that it has had, which a CPU goes through quickly."""

    def __init__(self) -> None:
        self._histories: weakref.WeakKeyDictionary[Sequence, _History] = weakref.WeakKeyDictionary()

    def apply(self, logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
        """Penalize some rows of logits, float32 [sequences, vocabulary], in place."""
        for row in rows:
            sampling = sequences[row].sampling
            had = self._count(sequences[row])
            ids, counts = torch.tensor(list(had.items()), dtype=torch.int64).unbind(1)
            scores = logits[row, ids]
            by = sampling.repetition_penalty
            scores = torch.where(scores < 0, scores * by, scores / by)
            logits[row, ids] = scores - (sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts)

    def _count(self, sequence: Sequence) -> dict[int, int]:
        history = self._histories.setdefault(sequence, _History())
        for place in range(history.known, len(sequence.tokens)):
            token = sequence.tokens[place]
            history.counts[token] = history.counts.get(token, 0) + (place >= sequence.num_prompt)
        history.known = len(sequence.tokens)
        return history.counts


class Penalties:
    """A table with a row for each penalized sequence until that is gone: which tokens it has, and how often.

    A row takes 5 bytes for each token of the vocabulary. Rows are added as they are needed, and used again.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._table_rows: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()
        self._known: dict[int, int] = {}
        """How many of its sequence's tokens are counted, by row."""
        self._free: list[int] = []
        self._seen = torch.zeros(0, vocabulary, dtype=torch.bool, device=device)
        """[rows, vocabulary]: whether the token is in the prompt or the answer."""
        self._counts = torch.zeros(0, vocabulary, dtype=torch.int32, device=device)
        """[rows, vocabulary]: how often the token is in the answer."""

    def apply(self, logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
        """Penalize some rows of logits, float32 [sequences, vocabulary], in place."""
        for first in range(0, len(rows), _GROUP):
            group = rows[first : first + _GROUP]
            self._apply(logits, group, [sequences[row] for row in group])

    def _apply(self, logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
        table_rows = self._count(sequences)
        table = torch.tensor(
            [
                [
                    row,
                    table_row,
                    s.sampling.repetition_penalty,
                    s.sampling.presence_penalty,
                    s.sampling.frequency_penalty,
                ]
                for row, table_row, s in zip(rows, table_rows, sequences, strict=True)
            ],
            dtype=torch.float64,
            pin_memory=logits.is_cuda,
        ).to(logits.device, non_blocking=True)
        index, table_row = table[:, 0].long(), table[:, 1].long()
        repetition, presence, frequency = table[:, 2:].float().unsqueeze(2).unbind(1)
        scores = logits[index]
        repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
        scores = torch.where(self._seen[table_row], repeated, scores)
        counts = self._counts[table_row]
        scores -= presence * (counts > 0) + frequency * counts
        logits[index] = scores

    def _count(self, sequences: list[Sequence]) -> list[int]:
        """Each sequence's row, after its new tokens have been counted."""
        table_rows = [self._row(sequence) for sequence in sequences]
        entries: list[tuple[int, int, int]] = []
        for row, sequence in zip(table_rows, sequences, strict=True):
            known = self._known[row]
            entries += [
                (row, token, int(known + i >= sequence.num_prompt)) for i, token in enumerate(sequence.tokens[known:])
            ]
            self._known[row] = len(sequence.tokens)
        if entries:
            pinned = torch.tensor(entries, dtype=torch.int64, pin_memory=self._seen.is_cuda)
            at, tokens, generated = pinned.to(self._seen.device, non_blocking=True).unbind(1)
            self._seen[at, tokens] = True
            self._counts.index_put_((at, tokens), generated.int(), accumulate=True)
        return table_rows

    def _row(self, sequence: Sequence) -> int:
        row = self._table_rows.get(sequence)
        if row is None:
            if not self._free:
                self._grow()
            row = self._free.pop()
            self._seen[row] = False
            self._counts[row] = 0
            self._known[row] = 0
            self._table_rows[sequence] = row
            weakref.finalize(sequence, self._free.append, row).atexit = False
        return row

    def _grow(self) -> None:
        count = self._seen.shape[0]
        more = max(count, _FIRST_ROWS)
        self._seen = torch.cat([self._seen, self._seen.new_zeros(more, self._seen.shape[1])])
        self._counts = torch.cat([self._counts, self._counts.new_zeros(more, self._counts.shape[1])])
        self._free += range(count, count + more)
