"""Number of draft tokens of a step: for every sequence the number that pays best for all of them together."""

from __future__ import annotations

from heapq import nlargest
from weakref import WeakKeyDictionary

from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.step import Drafts, Step
from server.engine.speculation.costs import MAX_DRAFT_TOKENS, StepCosts, gains_of
from server.engine.speculation.lookup import LookupProposer

FOLLOWED_PER_STEP = 1024
"""Tokens that are indexed before a step at most, so that a long prompt does not hold up other sequences (1 ms)."""


class Speculator:
    """Plans the draft tokens of steps, which it looks up, and counts how many are accepted."""

    def __init__(self, costs: StepCosts, max_model_len: int) -> None:
        self.costs = costs
        self._max_model_len = max_model_len
        self.proposers: WeakKeyDictionary[Sequence, LookupProposer] = WeakKeyDictionary()
        self.drafts = 0
        """Times that a sequence had draft tokens in a step."""
        self.draft_tokens = 0
        """Draft tokens that were verified."""
        self.accepted = [0] * MAX_DRAFT_TOKENS
        """Accepted draft tokens, by their place among their sequence's draft tokens of a step."""

    def plan(self, step: Step) -> Drafts:
        """The draft tokens for a step, going by the tokens that are known.

        While a sequence's newest token is not known they are void, but tell whether there will likely be some.
        """
        chunks = step.chunks
        if not self.may_have_drafts(step):
            return {}
        promised, candidates = self._candidates(step)
        # Most steps promise too little, which is known without putting draft tokens in order.
        if promised < self.costs.least_gained(len(chunks)):
            return {}
        found = [
            (gain, sequence)
            for sequence, proposer, count, unknown in candidates
            for gain in gains_of(proposer.survival(count + unknown)[unknown:])
        ]
        found = nlargest(self.costs.max_tokens - len(chunks), found, key=lambda pair: pair[0])
        best, _ = self.costs.fastest(len(chunks), [gain for gain, _ in found])
        counts: dict[Sequence, int] = {}
        for _, sequence in found[:best]:
            counts[sequence] = counts.get(sequence, 0) + 1
        drafts: dict[str, list[int]] = {}
        for sequence, count in counts.items():
            tokens, constraint = self.proposers[sequence].propose(count), sequence.constraint
            if constraint is not None:
                tokens = tokens[: constraint.permitted(tokens)]
            if tokens:
                drafts[sequence.request_id] = tokens
        return drafts

    def _candidates(self, step: Step) -> tuple[float, list[tuple[Sequence, LookupProposer, int, int]]]:
        """Estimate the tokens that draft tokens of a step's sequences give, and the sequences that may have some.

        With each its proposer, the most draft tokens, and how many tokens are not known yet: one of these must be the first
        draft token for the others to come up.
        """
        budget, promised = FOLLOWED_PER_STEP, 0.0
        candidates: list[tuple[Sequence, LookupProposer, int, int]] = []
        chunks = step.chunks
        # Not every sequence can get the largest number of draft tokens.
        reach = min(MAX_DRAFT_TOKENS, 3 * (self.costs.max_tokens - len(chunks)) // len(chunks) + 1)
        for chunk in chunks:
            sequence = chunk.sequence
            if not sequence.sampling.speculation:
                continue
            proposer = self.proposers.get(sequence)
            if proposer is None:
                proposer = self.proposers[sequence] = LookupProposer(sequence.num_prompt)
            unknown = int(sequence.has_placeholder)
            known = len(sequence.tokens) - unknown
            if proposer.known < known:
                budget -= proposer.follow(sequence.tokens, known, budget)
            if proposer.known == known:
                count = min(sequence.max_new_tokens(self._max_model_len) - 1, reach)
                promised += proposer.promise(unknown, count)
                candidates.append((sequence, proposer, count, unknown))
        return promised, candidates

    def may_have_drafts(self, step: Step) -> bool:
        """Whether the step decodes only, with few enough sequences for accepted draft tokens to pay."""
        chunks = step.chunks
        return (
            0 < len(chunks) < self.costs.max_tokens
            and all(chunk.samples and chunk.is_decode for chunk in chunks)
            and self.costs.may_pay(len(chunks))
        )

    def propose(self, step: Step) -> None:
        """Complete the draft tokens of a step that waited for them, which are scheduled as plan() had it."""
        if not step.drafts:
            self.costs.note_void()

    def catch_up(self, step: Step) -> None:
        """Prepare for draft tokens behind a step that runs, or has run."""

    def note_accepted(self, step: Step) -> None:
        """Count the draft tokens of a step that has been accounted for; where a sequence got nothing, none counts."""
        for chunk in step.chunks:
            if chunk.draft_tokens and not chunk.sequence.has_placeholder:
                self.count(chunk.sequence, len(chunk.draft_tokens), chunk.num_added - 1)

    def count(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Count one sequence's draft tokens in one step; all that were accepted are among its tokens."""
        self.drafts += 1
        self.draft_tokens += drafted
        for place in range(accepted):
            self.accepted[place] += 1

    def note_time(self, step: Step, seconds: float) -> None:
        """Learn what a decode step took, from the end of the one in front to its own."""
        if step.chunks and all(chunk.is_decode for chunk in step.chunks):
            self.costs.note(step.num_tokens, seconds, bool(step.drafts))
