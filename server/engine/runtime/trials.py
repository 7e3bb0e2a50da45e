"""Something faster is tried before it is used; where it fails, something slower runs and the log says why."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)


def failure(attempt: Callable[[], object]) -> str | None:
    """Why attempt() fails, in one line; None where it does not.

    Raises torch.OutOfMemoryError and torch.AcceleratorError: they say nothing of what is tried.
    """
    try:
        attempt()
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as e:
        logger.debug("what was tried fails", exc_info=True)
        return summary(e)
    return None


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far found is from expected in the norm of all elements, in times expected's."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def summary(error: BaseException) -> str:
    """The line of an error's message that says most: a compiler's first error, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line or "error " in line]
    return f"{type(error).__name__}: {[*telling, *lines, 'no message'][0][:300]}"
