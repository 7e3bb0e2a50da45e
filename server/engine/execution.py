"""A step's execution, in which the failure of one sequence does not fail the others."""

from __future__ import annotations

import logging

import torch

from server.engine.runtime.exchange import ExchangeError
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.runtime.trials import first_line
from server.engine.scheduling.step import Step

logger = logging.getLogger(__name__)


def execute(runner: ModelRunner, step: Step) -> tuple[list[Sampled], dict[str, str]]:
    """One result for each of step.sampled, and the requests that failed with the reasons.

    Raises torch.AcceleratorError and ExchangeError, after which only a new process helps.
    """
    try:
        return runner.execute(step), {}
    except (torch.AcceleratorError, ExchangeError):
        raise  # the device's context is lost, or other ranks wait in the step
    except Exception:
        step.guesses, step.drafted = {}, None
        logger.exception("a step of %d sequences failed; trying each alone", len(step.chunks))
    # Computing a chunk again writes the same keys and values again, so sequences that are not at fault lose nothing.
    results: list[Sampled] = []
    failures: dict[str, str] = {}
    for chunk in step.chunks:
        try:
            results += runner.execute(Step([chunk]))
        except (torch.AcceleratorError, ExchangeError):
            raise
        except Exception as e:
            failures[chunk.sequence.request_id] = f"the model failed: {type(e).__name__}: {first_line(e)}"
            results += [Sampled(0)] if chunk.samples else []
    return results, failures
