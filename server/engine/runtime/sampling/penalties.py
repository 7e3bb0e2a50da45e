"""Repetition, presence and frequency penalties.

The tokens that a sequence has had are counted once and kept; on a GPU one table holds them for all sequences.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
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
        # Rows behind guesses of one sequence have its tokens in common.
        common: dict[Sequence, tuple[torch.Tensor, torch.Tensor]] = {}
        for row in rows:
            sequence, own = sequences[row], sequences[row].original
            had = self._count(own)
            if own not in common:
                common[own] = _columns(had)
            ids, counts = common[own]
            if not sequence.guessed:
                logits[row, ids] = _penalized(logits[row, ids], counts, sequence)
                continue
            guessed = Counter(sequence.guessed)
            behind, more = _columns({token: had.get(token, 0) + count for token, count in guessed.items()})
            scores = logits[row, behind]
            logits[row, ids] = _penalized(logits[row, ids], counts, sequence)
            logits[row, behind] = _penalized(scores, more, sequence)

    def _count(self, sequence: Sequence) -> dict[int, int]:
        history = self._histories.setdefault(sequence, _History())
        for place in range(history.known, len(sequence.tokens)):
            token = sequence.tokens[place]
            history.counts[token] = history.counts.get(token, 0) + (place >= sequence.num_prompt)
        history.known = len(sequence.tokens)
        return history.counts


def _columns(counts: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [tokens]: the tokens, and how often each is in the answer."""
    ids, found = torch.tensor([*counts.items()], dtype=torch.int64).view(-1, 2).unbind(1)
    return ids, found


def _penalized(scores: torch.Tensor, counts: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Scores of tokens that a sequence has, each so often in its answer."""
    sampling = sequence.sampling
    by = sampling.repetition_penalty
    scores = torch.where(scores < 0, scores * by, scores / by)
    return scores - (sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts)


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
        found = torch.where(self._seen[table_row], repeated, scores)
        counts = self._counts[table_row]
        found -= presence * (counts > 0) + frequency * counts
        guessed = [
            (place, token, count)
            for place, sequence in enumerate(sequences)
            for token, count in Counter(sequence.guessed).items()
        ]
        if guessed:
            # These the sequences would have had, too, and more often than the table says.
            place, token, more = _columns_on(logits.device, guessed)
            count = counts[place, token] + more.int()
            penalty = presence[place, 0] * (count > 0) + frequency[place, 0] * count
            found[place, token] = repeated[place, token] - penalty
        logits[index] = found

    def _count(self, sequences: list[Sequence]) -> list[int]:
        """Each sequence's row, after its new tokens have been counted."""
        table_rows = [self._row(sequence.original) for sequence in sequences]
        entries: list[tuple[int, int, int]] = []
        for row, sequence in zip(table_rows, (own.original for own in sequences), strict=True):
            known = self._known[row]
            entries += [
                (row, token, int(known + i >= sequence.num_prompt)) for i, token in enumerate(sequence.tokens[known:])
            ]
            self._known[row] = len(sequence.tokens)
        if entries:
            at, tokens, generated = _columns_on(self._seen.device, entries)
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


def _columns_on(device: torch.device, rows: list[tuple[int, int, int]]) -> tuple[torch.Tensor, ...]:
    """The three columns of rows, int64 [rows]; the host does not wait for the device."""
    pinned = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True).unbind(1)
