"""Guesses by a draft model: how many each sequence has, and which tokens the draft model has computed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.sequence import PLACEHOLDER, Phase, Sequence
from server.engine.scheduling.step import Step
from server.engine.speculation.costs import StepCosts, gains_of
from server.engine.speculation.speculator import Speculator

MAX_DRAFTED = 8
"""Guesses for one sequence in one step at most: each takes a step of the draft model."""
SHORT_LAG = 32
"""Tokens that the draft model may lack when it begins to guess; where it lacks more, it computes these first."""
_FIRST_RATE = 0.7
# A sequence's rate is learned from its first guesses as if the rate that it begins with were that of seven before them, and
# from later ones at the learning rate.
_FIRST_GUESSES, _LEARNING_RATE = 8, 1 / 24
# The rate of all sequences together, with which a new one begins.
_COMMON_LEARNING_RATE = 1 / 32
# Each step without guesses moves the rate back towards its initial value, so that guesses are tried again at some point.
_FORGETTING_RATE = 1 / 1024
# Steps after which it is asked again whether guesses would pay, where the draft model lags behind because they did not.
_ASKED_EVERY = 32


class DraftModel(Protocol):
    """The second model; see server.engine.runtime.speculation.draft_model."""

    @property
    def longest(self) -> int:
        """Tokens that it can compute of one sequence."""
        ...

    def follow(self, parts: Items[tuple[Sequence, int]]) -> None:
        """Compute that many more known tokens of each sequence, which their num_drafted says then."""
        ...

    def guess(self, step: Step) -> None:
        """Put guesses in the places that step.guesses has for them, or empty it where that fails.

        The sequences' num_drafted says then that all their known tokens are computed.
        """
        ...


class DraftSpeculator(Speculator):
    """Plans how many guesses a draft model makes, has them made, and keeps account of what it has computed.

    The draft model's keys and values are in the sequences' own KV blocks, beside the model's. It computes tokens when
    it is about to guess, so a sequence that has no guesses costs it nothing.
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
        self._steps_until_asked = 0
        # A plan made in advance: the sequences of a step, those that may have guesses, and what _chosen() gives for them.
        self._prepared: tuple[int, set[Sequence], list[Sequence]] | None = None

    def plan(self, step: Step) -> bool:
        """Plan as Speculator does; step.guesses gets places for guesses, which draft() fills."""
        step.guesses, prepared, self._prepared = {}, self._prepared, None
        chunks = step.chunks
        if not self.may_have_guesses(step):
            return False
        rates = [found for found in self._rates(step) if _lag(found[2]) <= SHORT_LAG]
        most = {sequence.request_id: own for _, own, sequence in rates}
        present = {own for *_, own in rates}
        if prepared is not None and prepared[:2] == (len(chunks), present):
            chosen = prepared[2]
        else:
            chosen = self._chosen(len(chunks), rates)
        for sequence in chosen:
            guesses = step.guesses.setdefault(sequence.request_id, [])
            if len(guesses) < most[sequence.request_id]:
                guesses.append(PLACEHOLDER)
        for rate, _, sequence in rates:
            sequence.acceptance = rate if sequence.request_id in step.guesses else _drifted(rate)
        if not chosen:
            self._rate = _drifted(self._rate)
        return bool(chosen)

    def _rates(self, step: Step) -> list[tuple[float, int, Sequence]]:
        """How likely a guess is right, and the most guesses, of each sequence of a step that may have some."""
        chunks = step.chunks
        reach = min(MAX_DRAFTED, 3 * (self.costs.max_tokens - len(chunks)) // len(chunks) + 1)
        found: list[tuple[float, int, Sequence]] = []
        for chunk in chunks:
            sequence = chunk.sequence
            most = min(reach, sequence.max_new_tokens(self._max_model_len) - 1)
            if most >= 1 and sequence.sampling.speculation:
                found.append((self._rate if sequence.acceptance is None else sequence.acceptance, most, sequence))
        return found

    def _chosen(self, sequences: int, rates: list[tuple[float, int, Sequence]]) -> list[Sequence]:
        """The sequences of the guesses with which all go on fastest, one entry a guess.

        All guesses up to a depth cost as many steps of the draft model as the depth is.
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

    def draft(self, step: Step) -> None:
        before = {chunk.sequence: chunk.sequence.num_drafted for chunk in step.chunks}
        step.drafting = len(step.guesses), max(map(len, step.guesses.values()))
        self._model.guess(step)
        self._name(before)
        for chunk in step.chunks:
            constraint, name = chunk.sequence.constraint, chunk.sequence.request_id
            if constraint is not None and name in step.guesses:
                step.read_guesses()
                guesses = step.guesses[name]
                # The first that is refused is checked as a wrong one, from which it is learned how often guesses are right.
                step.guesses[name] = guesses[: constraint.permitted(guesses) + 1]

    def note_guesses(self, sequence: Sequence, checked: int, accepted: int) -> None:
        super().note_guesses(sequence, checked, accepted)
        for place in range(min(accepted + 1, checked)):
            right = place < accepted
            if sequence.acceptance is not None:
                learned = max(_LEARNING_RATE, 1 / (_FIRST_GUESSES + sequence.num_judged))
                sequence.acceptance += (right - sequence.acceptance) * learned
                sequence.num_judged += 1
            self._rate += (right - self._rate) * _COMMON_LEARNING_RATE
        if sequence.phase is Phase.RUNNING:
            # The last guess has not been computed.
            before = sequence.num_drafted
            sequence.num_drafted += min(accepted, checked - 1)
            self._name({sequence: before})

    def catch_up(self, step: Step) -> None:
        """Have known tokens computed of a step's sequences, where guesses are expected to pay, and plan the next step.

        The tokens are as many as a step may have, so that prompts are computed in chunks here, too.
        """
        if not self.may_have_guesses(step):
            return
        if step.guesses:
            # Where the step has been launched, the device works meanwhile, and the rates are those before its guesses.
            rates = self._rates(step)
            self._prepared = len(step.chunks), {s for *_, s in rates}, self._chosen(len(step.chunks), rates)
        running = (chunk.sequence for chunk in step.chunks if chunk.sequence.phase is Phase.RUNNING)
        behind = [sequence for sequence in running if _lag(sequence) > SHORT_LAG and self._may_go_on(sequence)]
        if not behind or not self._pays(step, behind):
            return
        left, parts, before = self._token_budget(), list[tuple[Sequence, int]](), dict[Sequence, int]()
        for sequence in behind:
            if left > 0:
                # The newest token, known or not, is left: guesses begin behind a token that they compute.
                parts.append((sequence, min(len(sequence.tokens) - 1 - sequence.num_drafted, left)))
                before[sequence] = sequence.num_drafted
                left -= parts[-1][1]
        self._model.follow(parts)
        self._name(before)

    def _pays(self, step: Step, behind: list[Sequence]) -> bool:
        """Whether a step like this one would have guesses if the draft model lagged behind in none of its sequences."""
        self._steps_until_asked -= 1
        if self._steps_until_asked > 0:
            return False
        if self._chosen(len(step.chunks), self._rates(step)):
            return True
        self._steps_until_asked = _ASKED_EVERY
        for sequence in behind:
            if sequence.acceptance is not None:
                sequence.acceptance = _drifted(sequence.acceptance, _ASKED_EVERY)
        return False

    def note_time(self, step: Step, seconds: float) -> None:
        if step.guesses:
            seconds -= self.costs.drafting(*step.drafting)
        super().note_time(step, seconds)

    def _may_go_on(self, sequence: Sequence) -> bool:
        return sequence.sampling.speculation and sequence.max_new_tokens(self._max_model_len) > 1

    def _name(self, before: dict[Sequence, int]) -> None:
        """Let later sequences know which full KV blocks the draft model has computed, too."""
        size = self._blocks.block_size
        for sequence, drafted in before.items():
            self._blocks.mark(sequence.blocks[drafted // size : sequence.num_drafted // size])


def _lag(sequence: Sequence) -> int:
    """Known tokens that the draft model has not computed."""
    return len(sequence.tokens) - sequence.has_placeholder - sequence.num_drafted


def _drifted(rate: float, steps: int = 1) -> float:
    """A rate after some steps without guesses."""
    return rate + (_FIRST_RATE - rate) * (1 - (1 - _FORGETTING_RATE) ** steps)
