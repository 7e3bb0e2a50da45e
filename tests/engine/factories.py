"""Short ways to make requests and sequences, and to run requests and schedulers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from server.engine.core import Engine
from server.engine.runtime.sampling.sampler import Sampled, Sampler
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.step import Step
from server.engine.speculation.costs import StepCosts
from server.types import GenerateRequest, RequestOutput, SamplingParams

_ids = itertools.count()


def fix_costs(engine: Engine, costs: StepCosts) -> None:
    """Say what steps take by which draft tokens are planned; measured times, which would change the plan, are not noted."""
    assert engine._speculator is not None
    engine._speculator.costs = costs
    engine._speculator.note_time = lambda *_: None  # type: ignore[method-assign]


def make_request(prompt: list[int] | int, request_id: str | None = None, **sampling: Any) -> GenerateRequest:
    """A greedy request of 8 tokens unless sampling says otherwise; a number makes a prompt of that length."""
    tokens = list(range(3, 3 + prompt)) if isinstance(prompt, int) else prompt
    options = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return GenerateRequest(request_id or f"r{next(_ids)}", tokens, SamplingParams(**options))


def make_sequence(
    prompt: list[int] | int, eos: frozenset[int] = frozenset(), request_id: str | None = None, **sampling: Any
) -> Sequence:
    """The sequence of make_request(...)."""
    return Sequence(make_request(prompt, request_id, **sampling), sampling.get("seed") or 0, eos)


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
    """Sample with a sampler that has seen none of the sequences before."""
    return Sampler(logits.shape[1], logits.device).sample(logits, sequences)


def run_together(engine: Engine, *requests: GenerateRequest) -> dict[str, list[RequestOutput]]:
    """All outputs of the requests, sent at once."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    """The tokens of one request's outputs."""
    return [token for output in outputs for token in output.new_token_ids]


class SchedulerDriver:
    """Runs a scheduler's steps in the engine's order (Engine.step()), without a model.

    With async_scheduling a decode step is launched before the tokens of the one before have been read. token says what is
    sampled for a sequence.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        token: Callable[[Sequence], int] = lambda _: 9,
        async_scheduling: bool = False,
    ) -> None:
        self._scheduler = scheduler
        self._token = token
        self._async = async_scheduling
        self._pending: Step | None = None
        self._deferred: Step | None = None

    @property
    def has_work(self) -> bool:
        """As Engine.has_work."""
        return self._scheduler.has_work or self._pending is not None

    def step(self, run: Callable[[Step], object] = lambda _: None) -> Step:
        """Schedule a step and run it; the chunks that ran, none where a step with prompts waits for the next call."""
        pending, self._pending = self._pending, None
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred.leave_out_ended()
        step = deferred if deferred is not None and deferred.size else self._scheduler.schedule()
        launched = self._async and step.size > 0 and step.samples_each
        if launched:
            run(step)
        if pending is not None:
            self._resolve(pending)
        if launched:
            self._scheduler.advance(step)
            self._pending = step
        else:
            step.leave_out_ended()
            if pending is not None and not step.is_decode:
                self._deferred = step
                return Step()
            run(step)
            self._scheduler.advance(step)
            self._resolve(step)
        return step

    def _resolve(self, step: Step) -> None:
        alive = self._scheduler.alive(step)
        self._scheduler.resolve(alive, [self._token(sequence) for sequence in alive.sampled_sequences])
