"""A step's execution: what a failure ends, and what it leaves alone."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from server.engine.runtime.exchange import ExchangeError
from server.engine.runtime.memory import is_out_of_memory
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.runtime.trials import first_line
from server.engine.scheduling.errors import DataError
from server.engine.scheduling.step import Chunk, Step

logger = logging.getLogger(__name__)

_LOST = (torch.AcceleratorError, ExchangeError)
"""After these only a new process helps: the device's context is lost, or other ranks wait in the step."""


class Executor:
    """Executes steps and counts those that failed, by cause: "request" or "engine"."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.failed_steps: Counter[str] = Counter(request=0, engine=0)

    def execute(self, step: Step) -> tuple[list[Sampled], dict[str, str]]:
        """One result for each of step.sampled, and the requests that failed with the reasons.

        Where a request's own data cannot be computed (DataError), that request fails alone. Any other error is a fault of
        the engine: all requests of the step fail with it, and nothing is computed again. Raises torch.AcceleratorError and
        ExchangeError, after which only a new process helps.
        """
        try:
            return self._runner.execute(step), {}
        except _LOST:
            raise
        except DataError as e:
            self.failed_steps["request"] += 1
            logger.warning("a step of %d sequences failed, each is computed alone: %s", len(step.chunks), e)
            return self._each_alone(step)
        except Exception as e:
            self._note_fault(step, e)
            return _failures(step, e)

    def _each_alone(self, step: Step) -> tuple[list[Sampled], dict[str, str]]:
        """execute() chunk by chunk; the same keys and values are written again, so sequences not at fault lose nothing."""
        results: list[list[Sampled]] = [[] for _ in step.chunks]
        failures: dict[str, str] = {}
        step.leave_out_drafts()
        for index in _restored_first(step.chunks):
            alone = Step([step.chunks[index]])
            try:
                results[index] = self._runner.execute(alone)
            except _LOST:
                raise
            except Exception as e:
                if not isinstance(e, DataError):
                    self._note_fault(alone, e)
                found, failed = _failures(alone, e)
                results[index] = found
                failures |= failed
        return [sampled for own in results for sampled in own], failures

    def _note_fault(self, step: Step, error: Exception) -> None:
        self.failed_steps["engine"] += 1
        logger.exception("a step of %d sequences failed by a fault of the engine; its requests end", len(step.chunks))
        if is_out_of_memory(error):
            logger.error("the GPU's memory did not hold a step of %d tokens; %s", step.num_tokens, self._runner.advice)


def _restored_first(chunks: Sequence[Chunk]) -> Iterator[int]:
    """Indices of a step's chunks in an order in which a snapshot is read before another chunk of the step replaces it."""
    left = list(range(len(chunks)))
    while left:
        read = Counter(chunks[index].restored for index in left)
        free = (i for i in left if all(read[slot] == (slot == chunks[i].restored) for slot in chunks[i].saved))
        index = next(free, left[0])
        left.remove(index)
        yield index


def _failures(step: Step, error: Exception) -> tuple[list[Sampled], dict[str, str]]:
    """Result of execute() for a step whose every request failed."""
    reason = f"the model failed: {type(error).__name__}: {first_line(error)}"
    return [Sampled(0)] * step.num_sampled, {chunk.sequence.request_id: reason for chunk in step.chunks}
