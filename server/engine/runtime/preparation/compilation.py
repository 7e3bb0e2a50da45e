"""Puts compiled layers in the place of the model's own code, if they compute the same on trial steps."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from server.checkpoint.base import Progress
from server.engine.runtime.compile.layers import compile_layers
from server.engine.runtime.compile.signatures import CompileError
from server.engine.runtime.exchange import agreed
from server.engine.runtime.model.decoder import decoder_layers
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.trial_steps import TrialSteps
from server.engine.runtime.trials import first_line

logger = logging.getLogger(__name__)

# Tokens of the trial steps. On CPU the first two run the code for few tokens, and the last the code for many.
_TRIALS = (1, 7, 17)


def compile_with_trials(paged: PagedModel, progress: Progress) -> bool:
    """Compile paged's layers; undone where they fail or differ by more than rounding. Returns whether they are compiled.

    Call in inference mode.
    """
    steps = TrialSteps(paged)
    plain = [steps.run(count) for count in _TRIALS]
    undo: Callable[[], None] | None = None
    try:
        undo = compile_layers(decoder_layers(paged.model), steps.run, progress)
    except CompileError as e:
        logger.warning("the model's layers run without torch.compile, more slowly: %s", e)
    if not agreed(undo is not None) or undo is None:
        if undo is not None:
            undo()
        return False
    try:
        wrong = _disagreement(steps, plain)
    except torch.AcceleratorError:
        raise  # the device's context is lost
    except Exception as e:
        wrong = f"fail: {type(e).__name__}: {first_line(e)}"
    if wrong is not None:
        logger.error("compiled layers %s; the model runs without them", wrong)
    if not agreed(wrong is None):
        undo()
        return False
    logger.info("compiled layers' logits are within %.1e of the model's own", steps.largest_error)
    return True


def _disagreement(steps: TrialSteps, plain: list[torch.Tensor]) -> str | None:
    """In words, how the trial steps' logits differ from plain by more than rounding."""
    for count, expected in zip(_TRIALS, plain, strict=True):
        wrong = steps.difference(steps.run(count), expected, count)
        if wrong is not None:
            return wrong
    return None
