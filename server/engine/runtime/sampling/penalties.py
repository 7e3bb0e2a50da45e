"""Repetition, presence and frequency penalties; what tokens sequences have had is kept, on a GPU for all of them at once."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field

import torch

from server.engine.scheduling.sequence import Sequence

# Rows penalized at a time: intermediate results are a few times their logits.
_GROUP = 16
_FIRST_PLACES = 8


@functools.cache
def penalties(vocabulary: int, device: torch.device) -> Penalties | HostPenalties:
    """The ones of a device for models of this vocabulary."""
    return Penalties(vocabulary, device) if device.type == "cuda" else HostPenalties()


@dataclass
class _Had:
    """A sequence's tokens, the first known of them."""

    known: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    """How often each is in the answer."""


class HostPenalties:
    """Sequence by sequence, of the tokens alone that it has had: a CPU is soon through with those."""

    def __init__(self) -> None:
        self._had: weakref.WeakKeyDictionary[Sequence, _Had] = weakref.WeakKeyDictionary()

    def apply(self, logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
        """Penalize some rows of logits, float32 [sequences, vocabulary], in place."""
        for row in rows:
            sampling = sequences[row].sampling
            had = self._up_to_date(sequences[row])
            ids, counts = torch.tensor(list(had.items()), dtype=torch.int64).unbind(1)
            scores = logits[row, ids]
            by = sampling.repetition_penalty
            scores = torch.where(scores < 0, scores * by, scores / by)
            logits[row, ids] = scores - (sampling.presence_penalty * (counts > 0) + sampling.frequency_penalty * counts)

    def _up_to_date(self, sequence: Sequence) -> dict[int, int]:
        had = self._had.setdefault(sequence, _Had())
        for place in range(had.known, len(sequence.tokens)):
            token = sequence.tokens[place]
            had.counts[token] = had.counts.get(token, 0) + (place >= sequence.num_prompt)
        had.known = len(sequence.tokens)
        return had.counts


class Penalties:
    """A row for each penalized sequence, its own until the sequence is gone: which tokens it has, and how often.

    5 bytes for each token of the vocabulary and sequence; rows are made as they are needed, and used again.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._places: weakref.WeakKeyDictionary[Sequence, int] = weakref.WeakKeyDictionary()
        self._known: dict[int, int] = {}
        """Tokens of the sequence in a place that its row has."""
        self._free: list[int] = []
        self._seen = torch.zeros(0, vocabulary, dtype=torch.bool, device=device)
        """Of the prompt and the answer."""
        self._counts = torch.zeros(0, vocabulary, dtype=torch.int32, device=device)
        """Of the answer."""

    def apply(self, logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
        """Penalize some rows of logits, float32 [sequences, vocabulary], in place."""
        for first in range(0, len(rows), _GROUP):
            group = rows[first : first + _GROUP]
            self._apply(logits, group, [sequences[row] for row in group])

    def _apply(self, logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
        places = self._up_to_date(sequences)
        table = torch.tensor(
            [
                [row, place, s.sampling.repetition_penalty, s.sampling.presence_penalty, s.sampling.frequency_penalty]
                for row, place, s in zip(rows, places, sequences, strict=True)
            ],
            dtype=torch.float64,
            pin_memory=logits.is_cuda,
        ).to(logits.device, non_blocking=True)
        index, place = table[:, 0].long(), table[:, 1].long()
        repetition, presence, frequency = table[:, 2:].float().unsqueeze(2).unbind(1)
        scores = logits[index]
        repeated = torch.where(scores < 0, scores * repetition, scores / repetition)
        scores = torch.where(self._seen[place], repeated, scores)
        counts = self._counts[place]
        scores -= presence * (counts > 0) + frequency * counts
        logits[index] = scores

    def _up_to_date(self, sequences: list[Sequence]) -> list[int]:
        """Each sequence's place, its row brought up to its last token."""
        places = [self._place(sequence) for sequence in sequences]
        entries: list[tuple[int, int, int]] = []
        for place, sequence in zip(places, sequences, strict=True):
            known = self._known[place]
            entries += [
                (place, token, int(known + i >= sequence.num_prompt)) for i, token in enumerate(sequence.tokens[known:])
            ]
            self._known[place] = len(sequence.tokens)
        if entries:
            pinned = torch.tensor(entries, dtype=torch.int64, pin_memory=self._seen.is_cuda)
            at, tokens, generated = pinned.to(self._seen.device, non_blocking=True).unbind(1)
            self._seen[at, tokens] = True
            self._counts.index_put_((at, tokens), generated.int(), accumulate=True)
        return places

    def _place(self, sequence: Sequence) -> int:
        place = self._places.get(sequence)
        if place is None:
            if not self._free:
                self._grow()
            place = self._free.pop()
            self._seen[place] = False
            self._counts[place] = 0
            self._known[place] = 0
            self._places[sequence] = place
            weakref.finalize(sequence, self._free.append, place).atexit = False
        return place

    def _grow(self) -> None:
        count = self._seen.shape[0]
        more = max(count, _FIRST_PLACES)
        self._seen = torch.cat([self._seen, self._seen.new_zeros(more, self._seen.shape[1])])
        self._counts = torch.cat([self._counts, self._counts.new_zeros(more, self._counts.shape[1])])
        self._free += range(count, count + more)
