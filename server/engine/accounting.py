"""Accounting for steps that have run: their sequences get their tokens, and their requests are told."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from server.engine.outputs import OutputBuilder
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.runtime.speculation.verification import accepted
from server.engine.scheduling.pace import PrefillPace
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.sequence import Phase, Sequence
from server.engine.scheduling.step import Step
from server.engine.speculation.speculator import Speculator
from server.logs import concerning
from server.types import RequestOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checked:
    """A step with guesses whose sequences have got their tokens; its requests have not been told."""

    step: Step
    """Its chunks of sequences that had not ended when it was read."""
    found: list[tuple[Sequence, list[Sampled], int]]
    """Those that got tokens, with their tokens and how many guesses were checked."""
    failures: dict[str, str]
    """Reasons by request id."""


class Accounting:
    """Accounts for steps for which Scheduler.advance() has been called.

    Sequences that ended between a step's launch and its reading get nothing of it.
    """

    def __init__(
        self, scheduler: Scheduler, outputs: OutputBuilder, pace: PrefillPace | None, speculator: Speculator | None
    ) -> None:
        self._scheduler = scheduler
        self._outputs = outputs
        self._pace = pace
        self._speculator = speculator

    def account(self, step: Step, results: list[Sampled], failures: dict[str, str]) -> list[RequestOutput]:
        """Account for a step that has ended now, one result for each of step.sampled; what each request is told.

        failures: requests whose computation failed, with the reasons.
        """
        self._outputs.step_clock.stop()
        # What guesses delay, because they need the tokens of the step in front, is no cost of a step without them.
        if step.ahead and self._speculator is not None:
            self._speculator.note_time(step, self._outputs.step_clock.seconds)
        step, results = self._settle(step, results, failures)
        return self._outputs.tell(step, results, failures)

    def settle_guesses(self, step: Step, results: list[Sampled]) -> Checked:
        """Account for a step with guesses that has ended now, one result for each of its tokens; tell() has to follow."""
        self._outputs.step_clock.stop()
        speculator = self._speculator
        assert speculator is not None
        firsts, others = accepted(step, results)
        failures: dict[str, str] = {}
        settled, firsts = self._settle(step, firsts, failures)
        found: list[tuple[Sequence, list[Sampled], int]] = []
        for chunk, first in zip(settled.chunks, firsts, strict=True):
            sequence = chunk.sequence
            if sequence.request_id in failures:
                continue
            own, guesses = [first], len(step.guesses.get(sequence.request_id, ()))
            if guesses:
                following = others[sequence.request_id]
                added = self._scheduler.follow(sequence, [result.token for result in following])
                speculator.note_guesses(sequence, guesses, added)
                own += following[:added]
            found.append((sequence, own, guesses))
        return Checked(settled, found, failures)

    def tell(self, checked: Checked) -> list[RequestOutput]:
        """What each request is told of a step with guesses."""
        self._outputs.share(checked.step.chunks)
        outputs = [self._outputs.error(request_id, reason) for request_id, reason in checked.failures.items()]
        for sequence, results, guesses in checked.found:
            self._outputs.note_guesses(sequence.request_id, guesses, len(results) - 1)
            outputs.append(self._outputs.tokens(sequence, results))
        return outputs

    def _settle(self, step: Step, results: list[Sampled], failures: dict[str, str]) -> tuple[Step, list[Sampled]]:
        """Give sequences their tokens; the chunks of those that had not ended, as a step, and their results.

        Results that are errors are added to failures.
        """
        if self._pace is not None:
            seconds = self._outputs.step_clock.seconds
            self._pace.note(step.prefill_tokens, seconds)
        alive = self._scheduler.alive(step)
        if alive is not step:
            found = zip(step.sampled_sequences, results, strict=True)
            results = [result for sequence, result in found if sequence.phase is not Phase.FINISHED]
            step = alive
        if [result.error for result in results].count(None) < len(results):
            found = zip(step.sampled_sequences, results, strict=True)
            failures.update((s.request_id, r.error) for s, r in found if r.error is not None)
        for request_id in failures:
            self._scheduler.finish(request_id, "error")
        for chunk in step.chunks if failures else ():
            if reason := failures.get(chunk.sequence.request_id):
                origin = concerning(chunk.sequence.http_request_id)
                logger.error("%s failed: %s", chunk.sequence.request_id, reason, extra=origin)
        self._scheduler.resolve(step, [result.token for result in results])
        return step, results
