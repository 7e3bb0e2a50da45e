"""Trials: something faster is tried before it is used, and where it fails the log says why something slower runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

logger = logging.getLogger(__name__)

_DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError)


class DifferenceError(Exception):
    """What is tried computes something else, as the message says."""


def failure(attempt: Callable[[], object], *unsuitable: type[Exception]) -> str | None:
    """Why attempt() fails, in one line; None where it does not.

    Other errors than unsuitable ones and differences have their type in it, and a traceback in a log of level debug.

    Raises torch.OutOfMemoryError and torch.AcceleratorError, which say nothing about what is tried.
    """
    try:
        attempt()
    except _DEVICE_ERRORS:
        raise
    except Exception as e:
        if isinstance(e, (DifferenceError, *unsuitable)):
            return first_line(e)
        logger.debug("what was tried fails", exc_info=True)
        return summary(e)
    return None


def side_by_side(attempts: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Run attempts for a CUDA device in a thread each. Raises what one of them raises, first what failure() raises.

    Triton compiles a kernel in 1 to 4 seconds, without Python's lock for the most part.
    """

    def run(attempt: Callable[[], object]) -> None:
        with torch.inference_mode(), torch.cuda.device(device):
            attempt()

    with ThreadPoolExecutor(len(attempts)) as pool:
        errors = [done.exception() for done in [pool.submit(run, attempt) for attempt in attempts]]
    raised = [error for error in errors if error is not None]
    if raised:
        raise min(raised, key=lambda error: not isinstance(error, _DEVICE_ERRORS))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of found - expected over the norm of expected, all elements together."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def summary(error: BaseException) -> str:
    """The most telling line of an error's message: a compiler's first error, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line or "error " in line]
    return f"{type(error).__name__}: {[*telling, *lines, 'no message'][0][:300]}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or ["no message"])[0]
