"""Work of one forward pass: chunks of sequences, whose last tokens may be draft tokens."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from server.engine.scheduling.sequence import Phase, Sequence

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
    draft_tokens: abc.Sequence[int] = ()
    """The last of its tokens, which the sequence does not have: proposed ones, of a decode chunk (speculation)."""
    num_accepted: int = 0
    """The first draft tokens that were sampled, too; known once the step has been read."""
    restored: int = -1
    """The slot of the snapshot of states that it begins with; -1: none."""
    saved: abc.Sequence[int] = ()
    """The slots that get a snapshot of the states at its end."""

    @property
    def scored(self) -> range:
        """Positions whose logits say how likely the prompt's next token was, where the request wants that."""
        wanted = self.sequence.sampling.prompt_logprobs is not None
        last = min(self.start + self.length, self.sequence.num_prompt - 1)
        return range(self.start, last) if wanted and last > self.start else range(0)

    @property
    def is_decode(self) -> bool:
        """Whether this is the newest token of a sequence that has generated before, with draft tokens or without."""
        return self.length == 1 + len(self.draft_tokens) and self.start >= self.sequence.num_prompt

    @property
    def token_ids(self) -> list[int]:
        """The tokens themselves."""
        known = self.sequence.tokens[self.start : self.start + self.length - len(self.draft_tokens)]
        return [*known, *self.draft_tokens]

    @property
    def num_added(self) -> int:
        """Tokens that the sequence has got, once it has been accounted for: accepted draft tokens and the one behind."""
        return len(self.sequence.tokens) - self.start - self.length + len(self.draft_tokens)

    @property
    def num_sampled(self) -> int:
        """Tokens that are sampled: the one that follows, or one behind the newest token and one behind each draft token."""
        return 1 + len(self.draft_tokens) if self.samples else 0


Drafts = Mapping[str, abc.Sequence[int]]
"""Draft tokens by request id."""


class UnreadDrafts(Protocol):
    """Draft tokens that a device has, or will have."""

    def read(self) -> Drafts:
        """Wait for the draft tokens."""
        ...


class Step:
    """Work of one forward pass: chunks of different sequences, those of one token first."""

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self.chunks = list(chunks)
        self.preempted: list[Sequence] = []
        self.admitted: list[Sequence] = []
        """Sequences that were waiting before this step."""
        self.unread: UnreadDrafts | None = None
        """Draft tokens that the host does not know yet; PLACEHOLDER stands for each of them."""
        self.ahead = False
        """Whether it was launched while the step in front of it still ran."""

    def add_prefill(self, sequence: Sequence, budget: int) -> int:
        """Put a chunk of a sequence's pending tokens behind the others; how many, 0 where it has to wait."""
        length = min(sequence.num_pending, budget)
        if sequence.sampling.prompt_logprobs is not None:
            length = min(length, max(1, MAX_SCORED - sum(len(chunk.scored) for chunk in self.chunks)))
        if sequence.images is not None:
            alone = all(chunk.length == 1 for chunk in self.chunks)
            length = sequence.images.chunk_length(sequence.num_computed, length, alone)
            if length == 0:
                return 0
        chunk = Chunk(sequence, sequence.num_computed, length, length == sequence.num_pending)
        self.chunks.append(chunk)
        return length

    def copy_states(self, restored: int, saved: abc.Sequence[int]) -> None:
        """Let the chunk that was added last begin with the snapshot in a slot, -1: none, and leave one in other slots."""
        if restored >= 0 or saved:
            self.chunks[-1] = msgspec.structs.replace(self.chunks[-1], restored=restored, saved=saved)

    def put_single_first(self) -> None:
        """Put the chunks of one token in front of the others."""
        self.chunks.sort(key=lambda chunk: chunk.length > 1)

    def leave_out_ended(self) -> None:
        """Leave out the chunks whose sequences do not run any more."""
        running = Phase.RUNNING
        if [sequence.phase for sequence in self.sequences].count(running) < self.size:
            self.chunks = [chunk for chunk in self.chunks if chunk.sequence.phase is running]

    @property
    def size(self) -> int:
        """Number of sequences that take part."""
        return len(self.chunks)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that take part, in the order of their chunks."""
        return [chunk.sequence for chunk in self.chunks]

    @property
    def sampled_sequences(self) -> list[Sequence]:
        """Those that get a token, in order."""
        return [chunk.sequence for chunk in self.chunks if chunk.samples]

    @property
    def is_decode(self) -> bool:
        """Whether each chunk is_decode."""
        return all(chunk.is_decode for chunk in self.chunks)

    @property
    def samples_each(self) -> bool:
        """Whether a token is sampled behind each token of each chunk."""
        return all(chunk.length == chunk.num_sampled for chunk in self.chunks)

    @property
    def is_raw(self) -> bool:
        """Whether each Sequence.is_raw."""
        return all(chunk.sequence.is_raw for chunk in self.chunks)

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar bounds any of its sequences."""
        return any(chunk.sequence.constraint is not None for chunk in self.chunks)

    @property
    def drafts(self) -> Drafts:
        """The draft tokens of the chunks that have some."""
        return {chunk.sequence.request_id: chunk.draft_tokens for chunk in self.chunks if chunk.draft_tokens}

    def schedule_drafts(self, drafts: Drafts) -> None:
        """Give these draft tokens, and no others, to the chunks of a step in which each is one token and samples."""
        found = [(chunk, drafts.get(chunk.sequence.request_id, ())) for chunk in self.chunks]
        self.chunks = [msgspec.structs.replace(chunk, length=1 + len(own), draft_tokens=own) for chunk, own in found]
        self.put_single_first()

    def leave_out_drafts(self) -> None:
        """Leave out all draft tokens."""
        if self.drafts:
            self.schedule_drafts({})
        self.unread = None

    def read_drafts(self) -> None:
        """Wait for draft tokens that the host does not know yet."""
        if self.unread is not None:
            found, self.unread = self.unread.read(), None
            self.schedule_drafts({name: found[name][: len(own)] for name, own in self.drafts.items()})

    @property
    def num_tokens(self) -> int:
        """Tokens in the forward pass."""
        return sum([chunk.length for chunk in self.chunks])

    @property
    def num_sampled(self) -> int:
        """Chunks that yield a token."""
        return sum([chunk.samples for chunk in self.chunks])

    @property
    def prefill_tokens(self) -> int:
        """Tokens of chunks that do not decode."""
        # What Chunk.is_decode says, without a call for each of a thousand chunks.
        own = self.chunks
        return sum([c.length for c in own if c.start < c.sequence.num_prompt or c.length != 1 + len(c.draft_tokens)])

    @property
    def sampled(self) -> list[Chunk]:
        """Chunks that yield a token, in order."""
        return [chunk for chunk in self.chunks if chunk.samples]
