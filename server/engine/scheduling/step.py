"""What one forward pass computes: chunks of sequences, and guesses behind them."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable
from typing import Protocol

import msgspec

from server.engine.scheduling.columns import Decoding
from server.engine.scheduling.sequence import Phase, SamplingNeeds, Sequence

MAX_SCORED = 256
"""Prompt tokens in one step whose logits are kept: each is a row as wide as the vocabulary."""


# Chunks are left out of garbage collection (gc=False): thousands a second are made, and none is part of a cycle.
class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + length) of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    length: int
    samples: bool
    """Whether the step that computes it yields the sequence's next token."""
    restored: int = -1
    """The slot of the snapshot of states that it begins with; -1: none."""
    saved: int = -1
    """The slot that gets a snapshot of the states at its end; -1: none."""

    @property
    def scored(self) -> range:
        """Positions whose logits say how likely the prompt's next token was, where the request wants that."""
        wanted = self.sequence.sampling.prompt_logprobs is not None
        last = min(self.start + self.length, self.sequence.num_prompt - 1)
        return range(self.start, last) if wanted and last > self.start else range(0)

    @property
    def is_decode(self) -> bool:
        """Whether this is the one newest token of a sequence that has generated before."""
        return self.length == 1 and self.start >= self.sequence.num_prompt


Chunks = abc.Sequence[Chunk]


class Drafted(Protocol):
    """Guesses that a draft model has not finished."""

    def read(self) -> dict[str, list[int]]:
        """Wait for the guesses, by request id."""
        ...


class Step:
    """What one forward pass computes: chunks of different sequences, those of one token first."""

    def __init__(
        self,
        chunks: Iterable[Chunk] = (),
        guesses: dict[str, list[int]] | None = None,
        drafted: Drafted | None = None,
        decoding: Decoding | None = None,
    ) -> None:
        """decoding: chunks in front of the others, in columns."""
        self._decoding = decoding
        self._others = list(chunks)
        self._chunks: list[Chunk] | None = None
        self.preempted: list[Sequence] = []
        self.admitted: list[Sequence] = []
        """Sequences that were waiting before this step."""
        self.guesses = {} if guesses is None else guesses
        """The guesses that the step checks behind decode chunks (speculation), by request id. Such chunks come last."""
        self.drafted = drafted
        """Where the host does not know the guesses yet; PLACEHOLDER then stands for each of them."""
        self.drafting = 0, 0
        """For how many sequences a draft model has made guesses, and how many for one at most."""
        self.ahead = False
        """Whether it was launched while the step in front of it still ran."""

    @property
    def decoding(self) -> Decoding | None:
        """The first chunks in columns, where the step was scheduled so: what can use these need not look at each chunk."""
        return self._decoding

    @property
    def others(self) -> Chunks:
        """The chunks that are not in columns."""
        return self._others

    @property
    def chunks(self) -> Chunks:
        """All chunks; those in columns are made when they are first asked for."""
        if self._decoding is None:
            return self._others
        if self._chunks is None:
            columns, starts = self._decoding.columns, self._decoding.starts.tolist()
            own = [Chunk(sequence, start, 1, True) for sequence, start in zip(columns.sequences, starts, strict=True)]
            self._chunks = own + self._others
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: Iterable[Chunk]) -> None:
        self._others, self._decoding, self._chunks = list(chunks), None, None

    def start_with(self, decoding: Decoding | None, chunks: list[Chunk]) -> None:
        """Replace all chunks by those in columns, if any, and chunks behind them."""
        self._decoding, self._others, self._chunks = decoding, chunks, None

    def add_prefill(self, sequence: Sequence, budget: int) -> int:
        """Put a chunk of a sequence's pending tokens behind the others; how many, 0 where it has to wait."""
        length = min(sequence.num_pending, budget)
        if sequence.sampling.prompt_logprobs is not None:
            length = min(length, max(1, MAX_SCORED - sum(len(chunk.scored) for chunk in self._others)))
        if sequence.images is not None:
            alone = all(chunk.length == 1 for chunk in self._others)
            length = sequence.images.chunk_length(sequence.num_computed, length, alone)
            if length == 0:
                return 0
        chunk = Chunk(sequence, sequence.num_computed, length, length == sequence.num_pending)
        self._others.append(chunk)
        self._chunks = None
        return length

    def copy_states(self, restored: int, saved: int) -> None:
        """Let the chunk that was added last begin with a snapshot, and be followed by one; -1: no."""
        if restored >= 0 or saved >= 0:
            self._others[-1] = msgspec.structs.replace(self._others[-1], restored=restored, saved=saved)
            self._chunks = None

    def put_single_first(self) -> None:
        """Put the chunks of one token in front of the others."""
        self._others.sort(key=lambda chunk: chunk.length > 1)
        self._chunks = None

    def leave_out_ended(self) -> None:
        """Leave out the chunks whose sequences do not run any more."""
        running = Phase.RUNNING
        if [sequence.phase for sequence in self.sequences].count(running) < self.size:
            self.chunks = [chunk for chunk in self.chunks if chunk.sequence.phase is running]

    @property
    def size(self) -> int:
        """How many sequences take part."""
        return self._num_decoding + len(self._others)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that take part, in the order of their chunks."""
        others = [chunk.sequence for chunk in self._others]
        return others if self._decoding is None else self._decoding.columns.sequences + others

    @property
    def sampled_sequences(self) -> list[Sequence]:
        """Those that get a token, in order."""
        others = [chunk.sequence for chunk in self._others if chunk.samples]
        return others if self._decoding is None else self._decoding.columns.sequences + others

    @property
    def is_decode(self) -> bool:
        """Whether each chunk is_decode."""
        return all(chunk.is_decode for chunk in self._others)

    @property
    def samples_each(self) -> bool:
        """Whether each chunk is one token, behind which one is sampled."""
        return all(chunk.samples and chunk.length == 1 for chunk in self._others)

    @property
    def is_raw(self) -> bool:
        """Whether each Sequence.is_raw."""
        decodes_raw = self._decoding is None or self._decoding.is_raw
        return decodes_raw and all(chunk.sequence.is_raw for chunk in self._others)

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar bounds any of its sequences."""
        traits = None if self._decoding is None else self._decoding.columns.traits
        own = traits is not None and bool(traits.needs & SamplingNeeds.GRAMMAR)
        return own or any(chunk.sequence.constraint is not None for chunk in self._others)

    @property
    def _num_decoding(self) -> int:
        return 0 if self._decoding is None else len(self._decoding)

    def read_guesses(self) -> None:
        """Wait for guesses that the host does not know yet."""
        if self.drafted is not None:
            found, self.drafted = self.drafted.read(), None
            self.guesses = {name: found[name][: len(own)] for name, own in self.guesses.items()}

    @property
    def num_tokens(self) -> int:
        """Tokens in the forward pass."""
        own = self._num_decoding + sum([chunk.length for chunk in self._others])
        return own + sum(map(len, self.guesses.values()))

    @property
    def num_sampled(self) -> int:
        """Chunks that yield a token."""
        return self._num_decoding + sum([chunk.samples for chunk in self._others])

    @property
    def prefill_tokens(self) -> int:
        """Tokens of chunks that do not decode."""
        # What Chunk.is_decode says, without a call for each of a thousand chunks.
        return sum([c.length for c in self._others if c.length != 1 or c.start < c.sequence.num_prompt])

    @property
    def sampled(self) -> list[Chunk]:
        """Chunks that yield a token, in order."""
        return [chunk for chunk in self.chunks if chunk.samples]
