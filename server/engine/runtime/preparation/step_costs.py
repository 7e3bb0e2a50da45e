"""What steps cost by their number of tokens, measured at the start: by that guesses are planned (speculation)."""

from __future__ import annotations

import time

from server.engine.runtime.limits import ModelLimits
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.trial_steps import TrialSteps

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_REPEATS = 3


def measure_steps(paged: PagedModel, limits: ModelLimits) -> dict[int, float]:
    """Seconds of steps by their tokens, the least of some runs. Call in inference mode, before the engine serves."""
    steps = TrialSteps(paged)
    found: dict[int, float] = {}
    for size in _SIZES:
        if size <= limits.max_model_len:
            steps.run(size)
            found[size] = min(_seconds(steps, size) for _ in range(_REPEATS))
    return found


def _seconds(steps: TrialSteps, size: int) -> float:
    begun = time.perf_counter()
    steps.run(size).argmax(dim=-1).tolist()
    return time.perf_counter() - begun
