"""What one forward pass computes: chunks of sequences, and guesses behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from server.engine.scheduling.sequence import Sequence


# Chunks are left out of garbage collection (gc=False): thousands a second are made, and none is part of a cycle.
class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + length) of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    length: int
    samples: bool
    """Whether the step that computes it yields the sequence's next token."""

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


class Drafted(Protocol):
    """Guesses that a draft model has not finished."""

    def read(self) -> dict[str, list[int]]:
        """Wait for the guesses, by request id."""
        ...


@dataclass
class Step:
    """What one forward pass computes: chunks of different sequences, those of one token first."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that were waiting before this step."""
    guesses: dict[str, list[int]] = field(default_factory=dict)
    """The guesses that the step checks behind decode chunks (speculation), by request id. Such chunks come last."""
    drafted: Drafted | None = None
    """Where the host does not know the guesses yet; PLACEHOLDER then stands for each of them."""
    drafting: tuple[int, int] = (0, 0)
    """For how many sequences a draft model has made guesses, and how many for one at most."""
    ahead: bool = False
    """Whether it was launched while the step in front of it still ran."""

    def read_guesses(self) -> None:
        """Wait for guesses that the host does not know yet."""
        if self.drafted is not None:
            found, self.drafted = self.drafted.read(), None
            self.guesses = {name: found[name][: len(own)] for name, own in self.guesses.items()}

    @property
    def num_tokens(self) -> int:
        """Tokens in the forward pass."""
        return sum([chunk.length for chunk in self.chunks]) + sum(map(len, self.guesses.values()))

    @property
    def prefill_tokens(self) -> int:
        """Tokens of chunks that do not decode."""
        # What Chunk.is_decode says, without a call for each of a thousand chunks.
        return sum([c.length for c in self.chunks if c.length != 1 or c.start < c.sequence.num_prompt])

    @property
    def sampled(self) -> list[Chunk]:
        """Chunks that yield a token, in order."""
        return [chunk for chunk in self.chunks if chunk.samples]


class Running(Protocol):
    """A step that has been launched, and perhaps not read."""

    @property
    def step(self) -> Step:
        """What it computes."""
        ...
