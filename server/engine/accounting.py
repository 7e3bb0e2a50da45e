"""Accounting for steps that have run: their sequences get their tokens, and their requests are told."""

from __future__ import annotations

import logging
from typing import NamedTuple

from server.engine.outputs import OutputBuilder
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.scheduling.pace import PrefillPace
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.sequence import Phase
from server.engine.scheduling.step import Step
from server.logs import concerning
from server.types import RequestOutput

logger = logging.getLogger(__name__)


class Settled(NamedTuple):
    """A step whose sequences have got their tokens; its requests have not been told."""

    step: Step
    """Its chunks of sequences that had not ended when it was read."""
    results: list[Sampled]
    """One for each of step.sampled."""
    failures: dict[str, str]
    """Reasons by request id."""


class Accounting:
    """Accounts for steps for which Scheduler.advance() has been called.

    Sequences that ended between a step's launch and its reading get nothing of it.
    """

    def __init__(self, scheduler: Scheduler, outputs: OutputBuilder, pace: PrefillPace | None) -> None:
        self._scheduler = scheduler
        self._outputs = outputs
        self._pace = pace

    def settle(self, step: Step, results: list[Sampled], failures: dict[str, str]) -> Settled:
        """Give the sequences of a step that has ended now their tokens, one result for each of step.sampled.

        failures: requests whose computation failed, with the reasons; results that are errors are added. tell() has to
        follow before another step ends.
        """
        self._outputs.step_clock.stop()
        if self._pace is not None:
            self._pace.note(step.prefill_tokens, self._outputs.step_clock.seconds)
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
        return Settled(step, results, failures)

    def tell(self, settled: Settled) -> list[RequestOutput]:
        """Outputs of a step for each request."""
        return self._outputs.tell(*settled)
