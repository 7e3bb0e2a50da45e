"""One request inside the engine: its tokens, how far they are computed, and the blocks of its keys and values."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from server.engine.scheduling.block_tables import BlockTables
from server.engine.scheduling.prefix import extend_keys
from server.engine.scheduling.prompt_images import PromptImages
from server.types import FinishReason, GenerateRequest, SamplingParams, TokenLogprob

PLACEHOLDER = -1
"""Stands in a sequence's tokens for one that the device has sampled and the host has not read yet (async scheduling)."""


class SamplingNeeds(enum.IntFlag):
    """Needs of sampling a sequence's next token, besides the model's logits and a temperature with filters."""

    NOTHING = 0
    PENALTIES = 1
    BIAS = 2
    MIN_TOKENS = 4
    """Its ends are banned until it has min_tokens."""
    GRAMMAR = 8
    LOGPROBS = 16
    EMBEDDING = 32
    """Its last hidden state in the place of a token."""
    ADJUSTED_LOGITS = PENALTIES | BIAS | MIN_TOKENS | GRAMMAR
    """The logits are changed before a token is chosen."""

    @classmethod
    def of(cls, sampling: SamplingParams, can_stop: bool) -> SamplingNeeds:
        """The needs of a request, a grammar left out; can_stop: whether any token ends it."""
        penalized = (
            sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        )
        found = cls.PENALTIES if penalized else cls.NOTHING
        found |= cls.BIAS if sampling.logit_bias else 0
        found |= cls.MIN_TOKENS if sampling.min_tokens > 0 and can_stop else 0
        found |= cls.LOGPROBS if sampling.logprobs is not None else 0
        return found | (cls.EMBEDDING if sampling.embed else 0)


class Constraint(Protocol):
    """A sequence's position in the grammar that bounds its text; see server.engine.grammar."""

    def permits(self, token: int) -> bool:
        """Whether this token may come next."""
        ...

    @property
    def may_end(self) -> bool:
        """Whether what was generated so far is complete."""
        ...

    @property
    def done(self) -> bool:
        """Whether nothing but the end can follow."""
        ...

    def accept(self, token: int) -> None:
        """Take a generated token."""
        ...

    def permitted(self, tokens: list[int]) -> int:
        """Number of these tokens, which have not been sampled, that the grammar takes one after another."""
        ...

    def ahead(self, token: int) -> Constraint | None:
        """The state behind one more token, which has not been sampled; None where nothing can follow it."""
        ...


@dataclass(frozen=True)
class LoadedAdapter:
    """A LoRA adapter on the device."""

    slot: int
    salt: bytes
    """Differs for every adapter that was ever loaded, because keys and values depend on the adapter."""


class Phase(enum.Enum):
    """Phase of a sequence's life."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """A request's state. tokens is the prompt followed by what was generated; a preempted sequence keeps both.

    seed is the request's own, or one chosen at random for it: together with a token's position it decides how that token
    is sampled, so neither preemption nor neighbours change it.
    """

    original: Sequence | None = None
    """The real sequence, of one as it would be with draft tokens (speculation)."""
    draft_tokens: tuple[int, ...] = ()
    """Draft tokens of such a one."""
    snapshot = -1
    """The slot of the states that it goes on from, until its next chunk has been scheduled; -1: its own."""
    backup = -1
    """The slot that keeps its states while draft tokens are verified; -1: it has no states."""
    saving: tuple[int, int, int] | None = None
    """Tokens at whose end a snapshot of its states is being taken, and its slots on the device and the host; -1: none."""
    branch = 0
    """Tokens that it has in common with an earlier sequence that went on otherwise, if a snapshot is missing there."""

    def __init__(
        self,
        request: GenerateRequest,
        seed: int,
        eos_token_ids: frozenset[int] = frozenset(),
        adapter: LoadedAdapter | None = None,
        images: PromptImages | None = None,
    ) -> None:
        self.request_id = request.request_id
        self.http_request_id = request.http_request_id
        self.sampling = request.sampling
        self.seed = seed
        self.tokens = list(request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.images = images
        self.num_computed = 0
        """Tokens whose keys and values are in the cache."""
        self.num_cached = 0
        """Prompt tokens that were found in the cache when the sequence was admitted first."""
        self.blocks: list[int] = []
        self.tables: BlockTables | None = None
        """Block tables that have its row, while it runs."""
        self.row = 0
        """Its row of the tables."""
        self.adapter = None if adapter is None else adapter.slot
        """The slot of its LoRA adapter."""
        self.adapter_name = request.adapter
        # Every token of a prompt that is scored has to be computed, also where a request of the same id was before.
        scored = self.sampling.prompt_logprobs is not None
        self.cache_salt = os.urandom(16) if scored else b"" if adapter is None else adapter.salt
        """Sequences of different salts share no blocks."""
        self.num_named = 0
        """KV blocks, from the first on, that other sequences can find by key."""
        self._keys: list[bytes] = []
        self._started = False
        self.phase = Phase.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        sampling = request.sampling
        self.max_length = self.num_prompt + sampling.max_tokens
        """The prompt's tokens and all that may be generated, at most the scheduler's longest length."""
        self.stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids)
        self.needs = SamplingNeeds.of(sampling, bool(self.stop_ids))
        """Needs of the sampler at first; see pending_needs."""
        self.embeds = sampling.embed
        """Whether it wants its last hidden state instead of a token."""
        self.constraint: Constraint | None = None
        self.prompt_scores: dict[int, TokenLogprob] = {}
        """Log-probabilities of prompt tokens by position, where the request wants them."""

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {len(self.tokens)} tokens, {self.num_computed} computed, {self.phase.name})"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt

    @property
    def is_too_short(self) -> bool:
        """Whether it has fewer than min_tokens, so that none of its ends may come next."""
        return self.num_generated < self.sampling.min_tokens

    @property
    def pending_needs(self) -> SamplingNeeds:
        """Needs of sampling its next token: min_tokens counts only as long as it is too short."""
        needs = self.needs
        return (
            needs & ~SamplingNeeds.MIN_TOKENS if needs & SamplingNeeds.MIN_TOKENS and not self.is_too_short else needs
        )

    @property
    def is_raw(self) -> bool:
        """Whether its next token is sampled from the model's logits as they are, and nothing else is asked for."""
        return not self.pending_needs

    def bind(self, constraint: Constraint | None) -> None:
        """Let a grammar bound what follows, or none."""
        self.constraint = constraint
        grammar = SamplingNeeds.GRAMMAR
        self.needs = self.needs & ~grammar if constraint is None else self.needs | grammar

    @property
    def num_pending(self) -> int:
        """Tokens still to be computed before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def has_placeholder(self) -> bool:
        """Whether the last token has not been read from the device yet."""
        return self.tokens[-1] == PLACEHOLDER

    @property
    def was_admitted(self) -> bool:
        """Whether it has held blocks before, as a preempted sequence has."""
        return self._started

    def start_with(self, blocks: list[int], num_computed: int) -> None:
        """Take blocks that hold its first num_computed tokens already, on being admitted."""
        self.blocks = blocks
        self.num_computed = num_computed
        self.num_named = len(blocks)
        if not self._started:
            self.num_cached = num_computed
        self._started = True

    def take_row(self, tables: BlockTables) -> None:
        """Write the blocks that it holds into a row of tables of its own."""
        self.tables, self.row = tables, tables.take(self.blocks)

    def give_row_back(self) -> None:
        """Let another sequence have its row, if it has one."""
        if self.tables is not None:
            self.tables.give_back(self.row)
            self.tables = None

    def block_keys(self, block_size: int, num_tokens: int, first: int = 0) -> list[bytes]:
        """Keys of the full blocks among the first num_tokens tokens, none of which may be a placeholder.

        first: the block from which on keys are wanted.
        """
        count = num_tokens // block_size
        images = () if self.images is None else self.images.spanning
        extend_keys(self._keys, self.tokens, block_size, count, self.cache_salt, images)
        return self._keys[first:count]

    def max_new_tokens(self, max_model_len: int) -> int:
        """Number of tokens that may follow the present last one."""
        return min(self.max_length, max_model_len) - len(self.tokens)

    def resolve(self, token: int) -> None:
        """Put the sampled token in the place of the placeholder, and set finish_reason if it is the last one."""
        tokens = self.tokens
        tokens[-1] = token
        # Most of a thousand sequences need no call.
        if len(tokens) >= self.max_length or token in self.stop_ids or self.constraint is not None:
            self._note_newest(token)

    def append(self, token: int) -> None:
        """Add a sampled token, and set finish_reason if it is the last one."""
        self.tokens.append(token)
        self._note_newest(token)

    def accept(self, draft_tokens: Items[int], bonus_token: int) -> None:
        """Put accepted draft tokens and what was sampled behind them in the placeholder's place, none behind an end."""
        del self.tokens[-1]
        for token in (*draft_tokens, bonus_token):
            if self.finish_reason is None:
                self.append(token)
        # Rejected draft tokens have been computed in vain.
        self.num_computed = len(self.tokens) - 1

    def _note_newest(self, token: int) -> None:
        if self.constraint is not None and token not in self.stop_ids:
            self.constraint.accept(token)
        if token in self.stop_ids and self.num_generated > self.sampling.min_tokens:
            self.finish_reason = "stop"
            self.stop_token_id = token
        elif self.constraint is not None and self.constraint.done:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_length:
            self.finish_reason = "length"
