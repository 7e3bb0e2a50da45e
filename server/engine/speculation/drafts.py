"""Draft tokens by a draft model: how many each sequence has, and which tokens the draft model has computed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.sequence import PLACEHOLDER, Phase, Sequence
from server.engine.scheduling.step import Drafts, Step, UnreadDrafts
from server.engine.speculation.costs import StepCosts, gains_of
from server.engine.speculation.speculator import Speculator

MAX_DRAFTED = 8
"""Draft tokens for one sequence in one step at most: each takes a step of the draft model."""
SHORT_LAG = 32
"""Tokens that the draft model may lack when it begins to propose; where it lacks more, it computes these first."""
_FIRST_RATE = 0.7
# A sequence's rate is learned from its first draft tokens as if the rate that it begins with were that of seven before them,
# and from later ones at the learning rate.
_FIRST_TOKENS, _LEARNING_RATE = 8, 1 / 24
# The rate of all sequences together, with which a new one begins.
_COMMON_LEARNING_RATE = 1 / 32
# Each step without draft tokens moves the rate back towards its initial value, so that they are tried again at some point.
_FORGETTING_RATE = 1 / 1024
# Steps after which it is asked again whether draft tokens would pay, where the draft model lags behind because they did not.
_ASKED_EVERY = 32


class DraftModel(Protocol):
    """The second model; see server.engine.runtime.speculation.draft_model."""

    @property
    def longest(self) -> int:
        """Tokens that it can compute of one sequence."""
        ...

    def follow(self, parts: Items[tuple[Sequence, int, int]]) -> bool:
        """Compute tokens [start, end) of sequences, all of them known; False if that fails."""
        ...

    def propose(self, asked: Items[tuple[Sequence, int, int]]) -> UnreadDrafts | None:
        """Compute what it lacks of sequences, all of whose tokens are known, and sample draft tokens; None if that fails.

        asked: sequences, how many tokens of each it has computed, and how many draft tokens are wanted.
        """
        ...


@dataclass
class DraftState:
    """Progress of the draft model in a sequence, and the success of its draft tokens."""

    blocks: list[int] = field(default_factory=list)
    """The sequence's KV blocks: it has another list once it has been preempted."""
    computed: int = 0
    """Tokens whose keys and values of the draft model are in these blocks."""
    rate: float | None = None
    """The share of its draft tokens that were accepted lately."""
    num_verified: int = 0
    """Draft tokens that the rate has been learned from."""


class DraftSpeculator(Speculator):
    """Plans how many tokens a draft model proposes, has them proposed, and keeps account of what it has computed.

    The draft model's keys and values are in the sequences' own KV blocks, with the model's. It computes tokens when it is
    about to propose, so a sequence that has no draft tokens costs it nothing.
    """

    def __init__(
        self,
        costs: StepCosts,
        max_model_len: int,
        model: DraftModel,
        blocks: BlockManager,
        token_budget: Callable[[], int],
    ) -> None:
        """blocks: those that sequences hold. token_budget: tokens that the draft model may catch up with now."""
        super().__init__(costs, min(max_model_len, model.longest))
        self._model = model
        self._blocks = blocks
        self._token_budget = token_budget
        self._rate = _FIRST_RATE
        self._states: WeakKeyDictionary[Sequence, DraftState] = WeakKeyDictionary()
        # KV blocks that have its keys and values, too, each with how often it had been handed out then.
        self._drafted: dict[int, int] = {}
        # For how many sequences it has proposed last, and how many tokens for one at most.
        self._proposed = 0, 0
        self._steps_until_asked = 0
        # A plan made in advance: the sequences of a step, those that may have draft tokens, and what _chosen() gives.
        self._prepared: tuple[int, set[Sequence], list[Sequence]] | None = None

    def state(self, sequence: Sequence) -> DraftState:
        """The draft model's part of a running sequence; what others have computed of blocks that it shares counts."""
        state = self._states.setdefault(sequence, DraftState())
        if state.blocks is not sequence.blocks:
            state.blocks, count, uses = sequence.blocks, 0, self._blocks.uses
            while count < len(state.blocks) and self._drafted.get(state.blocks[count]) == uses[state.blocks[count]]:
                count += 1
            state.computed = count * self._blocks.block_size
        return state

    def plan(self, step: Step) -> Drafts:
        """Plan as Speculator does; PLACEHOLDER stands for each draft token, which propose() finds."""
        prepared, self._prepared = self._prepared, None
        chunks = step.chunks
        if not self.may_have_drafts(step):
            return {}
        rates = [found for found in self._rates(step) if self._lag(found[2]) <= SHORT_LAG]
        most = {sequence.request_id: own for _, own, sequence in rates}
        present = {own for *_, own in rates}
        if prepared is not None and prepared[:2] == (len(chunks), present):
            chosen = prepared[2]
        else:
            chosen = self._chosen(len(chunks), rates)
        drafts: dict[str, list[int]] = {}
        for sequence in chosen:
            tokens = drafts.setdefault(sequence.request_id, [])
            if len(tokens) < most[sequence.request_id]:
                tokens.append(PLACEHOLDER)
        for rate, _, sequence in rates:
            self.state(sequence).rate = rate if sequence.request_id in drafts else _drifted(rate)
        if not chosen:
            self._rate = _drifted(self._rate)
        return drafts

    def _rates(self, step: Step) -> list[tuple[float, int, Sequence]]:
        """Probability that a draft token is accepted, and the most of them, per sequence of a step that may have some."""
        chunks = step.chunks
        reach = min(MAX_DRAFTED, 3 * (self.costs.max_tokens - len(chunks)) // len(chunks) + 1)
        found: list[tuple[float, int, Sequence]] = []
        for chunk in chunks:
            sequence = chunk.sequence
            most = min(reach, sequence.max_new_tokens(self._max_model_len) - 1)
            if most >= 1 and sequence.sampling.speculation:
                rate = self.state(sequence).rate
                found.append((self._rate if rate is None else rate, most, sequence))
        return found

    def _chosen(self, sequences: int, rates: list[tuple[float, int, Sequence]]) -> list[Sequence]:
        """The sequences of the draft tokens with which all go on fastest, one entry per draft token.

        All draft tokens up to a depth cost as many steps of the draft model as the depth is.
        """
        found: list[tuple[float, Sequence]] = []
        best: list[Sequence] = []
        highest = 0.0
        gains = [gains_of(rate ** (place + 1) for place in range(most)) for rate, most, _ in rates]
        for place in range(max((most for _, most, _ in rates), default=0)):
            found += [
                (own[place], sequence) for own, (_, _, sequence) in zip(gains, rates, strict=True) if len(own) > place
            ]
            found.sort(key=lambda pair: -pair[0])
            room = found[: self.costs.max_tokens - sequences]
            drafted = self.costs.drafting(len(rates), place + 1)
            count, speed = self.costs.fastest(sequences, [gain for gain, _ in room], drafted)
            if count and speed > highest:
                best, highest = [sequence for _, sequence in room[:count]], speed
        return best

    def propose(self, step: Step) -> None:
        asked = [(chunk.sequence, len(chunk.draft_tokens)) for chunk in step.chunks if chunk.draft_tokens]
        if asked:
            self._proposed = len(asked), max(count for _, count in asked)
            step.unread = self._model.propose([(own, self.state(own).computed, count) for own, count in asked])
            if step.unread is None:
                step.leave_out_drafts()
        for sequence, _ in asked if step.drafts else ():
            self._note_computed(sequence, len(sequence.tokens))
        if any(sequence.constraint is not None for sequence, _ in asked) and step.drafts:
            step.read_drafts()
            step.schedule_drafts({c.sequence.request_id: _permitted(c.sequence, c.draft_tokens) for c in step.chunks})
        super().propose(step)

    def count(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        super().count(sequence, drafted, accepted)
        state = self.state(sequence)
        for place in range(min(accepted + 1, drafted)):
            right = place < accepted
            if state.rate is not None:
                learned = max(_LEARNING_RATE, 1 / (_FIRST_TOKENS + state.num_verified))
                state.rate += (right - state.rate) * learned
                state.num_verified += 1
            self._rate += (right - self._rate) * _COMMON_LEARNING_RATE
        if sequence.phase is Phase.RUNNING:
            # The last draft token has not been computed.
            self._note_computed(sequence, state.computed + min(accepted, drafted - 1))

    def catch_up(self, step: Step) -> None:
        """Have known tokens computed of a step's sequences, where draft tokens are expected to pay, and plan the next step.

        The tokens are as many as a step may have, so that prompts are computed in chunks here, too.
        """
        if not self.may_have_drafts(step):
            return
        if step.drafts:
            # Where the step has been launched, the device works meanwhile, and the rates are those before its draft tokens.
            rates = self._rates(step)
            self._prepared = len(step.chunks), {s for *_, s in rates}, self._chosen(len(step.chunks), rates)
        running = (chunk.sequence for chunk in step.chunks if chunk.sequence.phase is Phase.RUNNING)
        behind = [sequence for sequence in running if self._lag(sequence) > SHORT_LAG and self._may_go_on(sequence)]
        if not behind or not self._pays(step, behind):
            return
        left, parts = self._token_budget(), list[tuple[Sequence, int, int]]()
        for sequence in behind:
            if left > 0:
                # The newest token, known or not, is left: proposing begins behind a token that it computes.
                start = self.state(sequence).computed
                parts.append((sequence, start, min(len(sequence.tokens) - 1, start + left)))
                left -= parts[-1][2] - start
        if self._model.follow(parts):
            for sequence, _, end in parts:
                self._note_computed(sequence, end)

    def _pays(self, step: Step, behind: list[Sequence]) -> bool:
        """Whether a step like this one would have draft tokens if the draft model lagged behind in none of its sequences."""
        self._steps_until_asked -= 1
        if self._steps_until_asked > 0:
            return False
        if self._chosen(len(step.chunks), self._rates(step)):
            return True
        self._steps_until_asked = _ASKED_EVERY
        for sequence in behind:
            state = self.state(sequence)
            if state.rate is not None:
                state.rate = _drifted(state.rate, _ASKED_EVERY)
        return False

    def note_time(self, step: Step, seconds: float) -> None:
        if step.drafts:
            seconds -= self.costs.drafting(*self._proposed)
        super().note_time(step, seconds)

    def _may_go_on(self, sequence: Sequence) -> bool:
        return sequence.sampling.speculation and sequence.max_new_tokens(self._max_model_len) > 1

    def _lag(self, sequence: Sequence) -> int:
        """Known tokens that the draft model has not computed."""
        return len(sequence.tokens) - sequence.has_placeholder - self.state(sequence).computed

    def _note_computed(self, sequence: Sequence, computed: int) -> None:
        """Note what the draft model has computed of a sequence; later sequences find it in the full KV blocks."""
        state, size = self.state(sequence), self._blocks.block_size
        for block in sequence.blocks[state.computed // size : computed // size]:
            self._drafted[block] = self._blocks.uses[block]
        state.computed = computed


def _permitted(sequence: Sequence, tokens: Items[int]) -> Items[int]:
    """The draft tokens that a sequence's grammar takes, and the first that it refuses: its rejection is learned from."""
    return tokens if sequence.constraint is None else tokens[: sequence.constraint.permitted([*tokens]) + 1]


def _drifted(rate: float, steps: int = 1) -> float:
    """A rate after some steps without draft tokens."""
    return rate + (_FIRST_RATE - rate) * (1 - (1 - _FORGETTING_RATE) ** steps)
