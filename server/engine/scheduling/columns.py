"""Sequences that decode, in columns: a step needs the same few facts of each of a thousand of them.

What does not change while a sequence runs is collected once, for as many steps as it decodes. What does change is found
for all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from server.engine.scheduling.block_tables import BlockTables
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.sequence import PLACEHOLDER, Phase, SamplingNeeds, Sequence

Numbers = npt.NDArray[np.int64]


class Departed(NamedTuple):
    """Number of sequences that have stopped running."""

    ended: int
    preempted: int


class Traits(NamedTuple):
    """Features that any of some sequences has."""

    needs: SamplingNeeds = SamplingNeeds.NOTHING
    adapted: bool = False
    with_images: bool = False

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> Traits:
        """Features that any of these has."""
        found = cls()
        for own in sequences:
            needs, adapted, with_images = own.needs, own.adapter is not None, own.images is not None
            if needs or adapted or with_images:
                found = found.merged(cls(needs, adapted, with_images))
        return found

    def merged(self, other: Traits) -> Traits:
        """Join with another's features."""
        needs, adapted, with_images = other
        return Traits(self.needs | needs, self.adapted or adapted, self.with_images or with_images)


class DecodeColumns:
    """S sequences in columns; all of it is the same in every step while they run."""

    def __init__(
        self,
        sequences: list[Sequence],
        tokens: list[list[int]],
        numbers: Numbers,
        stop_ids: frozenset[int],
        traits: Traits,
        departed: Departed,
    ) -> None:
        self.sequences = sequences
        self.tokens = tokens
        """[S]: the lists of their tokens, which grow."""
        self._numbers = numbers
        self.rows, self.prompts, self.max_lengths, self.raw_from = numbers
        """[S] each: their rows of the block tables, tokens of their prompts, the most tokens that each may have, and with
        how many tokens min_tokens changes the logits no more."""
        self.stop_ids = stop_ids
        """All tokens that end any of them, and perhaps more."""
        self.traits = traits
        self.departed = departed
        """Number of the scheduler's sequences that had stopped running when these were seen to run."""
        self._left: tuple[list[bool], DecodeColumns] | None = None

    @classmethod
    def of(cls, sequences: list[Sequence], departed: Departed) -> DecodeColumns:
        """Those of sequences that run."""
        minimum = SamplingNeeds.MIN_TOKENS
        numbers = [
            (s.row, s.num_prompt, s.max_length, s.num_prompt + s.sampling.min_tokens if s.needs & minimum else 0)
            for s in sequences
        ]
        return cls(
            sequences,
            [sequence.tokens for sequence in sequences],
            np.array(numbers, np.int64).reshape(-1, 4).T.copy(),
            frozenset().union(*{sequence.stop_ids for sequence in sequences}),
            Traits.of(sequences),
            departed,
        )

    def __len__(self) -> int:
        return len(self.sequences)

    def with_others(self, sequences: list[Sequence]) -> DecodeColumns:
        """These and behind them others, which run."""
        others = DecodeColumns.of(sequences, self.departed)
        return DecodeColumns(
            self.sequences + others.sequences,
            self.tokens + others.tokens,
            np.concatenate((self._numbers, others._numbers), axis=1),
            self.stop_ids | others.stop_ids,
            self.traits.merged(others.traits),
            self.departed,
        )

    def where(self, chosen: list[bool]) -> DecodeColumns:
        """Some of these."""
        sequences = list(compress(self.sequences, chosen))
        return DecodeColumns(
            sequences,
            list(compress(self.tokens, chosen)),
            self._numbers.compress(chosen, axis=1),
            self.stop_ids,
            Traits.of(sequences) if any(self.traits) else self.traits,
            self.departed,
        )

    def still_running(self, departed: Departed) -> tuple[list[bool] | None, DecodeColumns]:
        """Flags of those that run (None: all), and their columns. departed: as of now, with none preempted since."""
        if departed == self.departed:
            return None, self
        if self._left is None or self._left[1].departed != departed:
            running = Phase.RUNNING
            runs = [sequence.phase is running for sequence in self.sequences]
            if all(runs):
                self.departed = departed
                return None, self
            self._left = runs, self.where(runs)
            self._left[1].departed = departed
        return self._left

    @cached_property
    def ones(self) -> Numbers:
        """[S]: the lengths of their chunks."""
        return np.ones(len(self), np.int64)

    @cached_property
    def places(self) -> Numbers:
        """[S]: 0, 1, ..."""
        return np.arange(len(self))

    @cached_property
    def adapters(self) -> list[int | None]:
        """[S]: the slots of their LoRA adapters."""
        return [sequence.adapter for sequence in self.sequences] if self.traits.adapted else [None] * len(self)

    @cached_property
    def offsets(self) -> Numbers | None:
        """[S]: what their images add to the positions of later tokens; None where there are no images."""
        if not self.traits.with_images:
            return None
        return np.array([0 if s.images is None else s.images.offset for s in self.sequences], np.int64)

    @cached_property
    def constrained(self) -> list[int]:
        """The places of those that a grammar bounds."""
        if not self.traits.needs & SamplingNeeds.GRAMMAR:
            return []
        return [place for place, sequence in enumerate(self.sequences) if sequence.constraint is not None]


@dataclass(frozen=True)
class Decoding:
    """One token of each of some running sequences, all behind their prompts; each gets its next token."""

    columns: DecodeColumns
    starts: Numbers
    """[S]: the places of the tokens in their sequences."""

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def is_raw(self) -> bool:
        """Whether tokens are sampled from the model's logits as they are, and nothing else is asked for."""
        others = self.columns.traits.needs & ~SamplingNeeds.MIN_TOKENS
        return not others and bool((self.starts + 1 >= self.columns.raw_from).all())

    def still_running(self, departed: Departed) -> Decoding:
        """The part of it whose sequences still run; departed: as of now, with none preempted since."""
        runs, columns = self.columns.still_running(departed)
        return self if runs is None else Decoding(columns, self.starts[runs])

    def take_blocks(self, blocks: BlockManager, tables: BlockTables) -> bool:
        """Take the KV blocks that the tokens need; False, with none taken, where not so many are free."""
        rows = self.columns.rows
        lacking = np.flatnonzero(self.starts >= tables.counts[rows] * blocks.block_size)
        if len(lacking) > blocks.num_free:
            return False
        if len(lacking):
            taken = [blocks.take() for _ in range(len(lacking))]
            for place, block in zip(lacking.tolist(), taken, strict=True):
                self.columns.sequences[place].blocks.append(block)
            tables.append(rows[lacking], taken)
        return True

    def newest(self) -> list[int]:
        """[S]: the tokens, some of which may be PLACEHOLDER, before advance()."""
        return [tokens[-1] for tokens in self.columns.tokens]

    def advance(self) -> None:
        """Count the tokens as computed, and put a PLACEHOLDER behind each."""
        for sequence, computed in zip(self.columns.sequences, (self.starts + 1).tolist(), strict=True):
            sequence.num_computed = computed
        for tokens in self.columns.tokens:
            tokens.append(PLACEHOLDER)

    def resolve(self, newest: list[int]) -> set[int]:
        """Put the tokens that were sampled in the places of the placeholders.

        Gives the places of the sequences that this may end, or whose grammars have to take the token.
        """
        columns = self.columns
        for tokens, token in zip(columns.tokens, newest, strict=True):
            tokens[-1] = token
        noted = set(columns.constrained)
        noted.update(np.flatnonzero(self.starts + 2 >= columns.max_lengths).tolist())
        if not columns.stop_ids.isdisjoint(newest):
            sequences = columns.sequences
            noted.update(place for place, token in enumerate(newest) if token in sequences[place].stop_ids)
        return noted

    def filled(self, block_size: int) -> list[int]:
        """The places of the sequences whose newest computed token fills a KV block, behind advance()."""
        found: list[int] = np.flatnonzero((self.starts + 1) % block_size == 0).tolist()
        return found
