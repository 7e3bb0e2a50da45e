"""Which guesses a step checks: for every sequence the number that pays best for all of them together."""

from __future__ import annotations

from heapq import nlargest

from server.engine.scheduling.sequence import GuessSource, Sequence
from server.engine.scheduling.step import Step
from server.engine.speculation.costs import MAX_GUESSES, StepCosts, gains_of
from server.engine.speculation.guesser import Guesser

FOLLOWED_PER_STEP = 1024
"""Tokens that are indexed before a step at most, so that a long prompt does not hold up other sequences (1 ms)."""


class Speculator:
    """Plans the guesses of steps by lookup, and counts how they fared."""

    def __init__(self, costs: StepCosts, max_model_len: int) -> None:
        self.costs = costs
        self._max_model_len = max_model_len
        self.drafts = 0
        """Times that a sequence had guesses checked."""
        self.draft_tokens = 0
        """Guesses that were checked."""
        self.accepted = [0] * MAX_GUESSES
        """How many guesses were accepted, by their place among their sequence's guesses of a step."""

    def plan(self, step: Step) -> bool:
        """Set step.guesses, going by the tokens that are known; gives whether there are any.

        While a sequence's newest token is not known the guesses are void, but tell whether there will likely be some.
        """
        step.guesses = {}
        chunks = step.chunks
        if not self.may_have_guesses(step):
            return False
        promised, candidates = self._candidates(step)
        # Most steps promise too little, which is known without putting guesses in order.
        if promised < self.costs.least_gained(len(chunks)):
            return False
        found = [
            (gain, sequence)
            for sequence, guesser, count, unknown in candidates
            for gain in gains_of(guesser.survival(count + unknown)[unknown:])
        ]
        found = nlargest(self.costs.max_tokens - len(chunks), found, key=lambda pair: pair[0])
        best, _ = self.costs.fastest(len(chunks), [gain for gain, _ in found])
        counts: dict[Sequence, int] = {}
        for _, sequence in found[:best]:
            counts[sequence] = counts.get(sequence, 0) + 1
        for sequence, count in counts.items():
            assert sequence.guesser is not None
            guesses, constraint = sequence.guesser.guesses(count), sequence.constraint
            if constraint is not None:
                guesses = guesses[: constraint.permitted(guesses)]
            if guesses:
                step.guesses[sequence.request_id] = guesses
        return bool(step.guesses)

    def _candidates(self, step: Step) -> tuple[float, list[tuple[Sequence, GuessSource, int, int]]]:
        """How many tokens the guesses of a step's sequences promise, and the sequences that may have some.

        With each its guesser, the most guesses, and how many tokens are not known yet: one of these must be the first guess
        for the others to come up.
        """
        budget, promised = FOLLOWED_PER_STEP, 0.0
        candidates: list[tuple[Sequence, GuessSource, int, int]] = []
        chunks = step.chunks
        # Not every sequence can get the largest number of guesses.
        reach = min(MAX_GUESSES, 3 * (self.costs.max_tokens - len(chunks)) // len(chunks) + 1)
        for chunk in chunks:
            sequence = chunk.sequence
            if not sequence.sampling.speculation:
                continue
            guesser = sequence.guesser
            if guesser is None:
                guesser = sequence.guesser = Guesser(sequence.num_prompt)
            unknown = int(sequence.has_placeholder)
            known = len(sequence.tokens) - unknown
            if guesser.known < known:
                budget -= guesser.follow(sequence.tokens, known, budget)
            if guesser.known == known:
                count = min(sequence.max_new_tokens(self._max_model_len) - 1, reach)
                promised += guesser.promise(unknown, count)
                candidates.append((sequence, guesser, count, unknown))
        return promised, candidates

    def may_have_guesses(self, step: Step) -> bool:
        """Whether the step decodes only, with few enough sequences for right guesses to pay."""
        chunks = step.chunks
        return (
            0 < len(chunks) < self.costs.max_tokens
            and all(chunk.samples and chunk.is_decode for chunk in chunks)
            and self.costs.may_pay(len(chunks))
        )

    def draft(self, step: Step) -> None:
        """Put guesses in the places that plan() has left for them; their KV blocks are taken."""

    def catch_up(self, step: Step) -> None:
        """Prepare for guesses behind a step that runs, or has run."""

    def note_guesses(self, sequence: Sequence, checked: int, accepted: int) -> None:
        """Count one sequence's guesses in one step; all that were accepted are among its tokens."""
        self.drafts += 1
        self.draft_tokens += checked
        for place in range(accepted):
            self.accepted[place] += 1

    def note_time(self, step: Step, seconds: float) -> None:
        """Learn what a decode step took, from the end of the one in front to its own."""
        if step.chunks and all(chunk.is_decode for chunk in step.chunks):
            self.costs.note(step.num_tokens, seconds, bool(step.guesses))
