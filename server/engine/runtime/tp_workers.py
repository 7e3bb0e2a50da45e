"""The workers of tensor parallelism, ranks 1 to N - 1, as rank 0's runner sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from server.engine.runtime.exchange import ExchangeError
from server.engine.runtime.graphs.launched_step import Launch
from server.engine.runtime.step_input import StepInput
from server.engine.runtime.trials import first_line


class TPWorkers(Protocol):
    """Compute every step that this rank computes."""

    def compute(self, given: StepInput, launch: Launch | None = None) -> None:
        """Begin to compute a step; launch: the way in which they sample its tokens, if they do."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Enter this while this rank waits for a step: if that takes too long, an exchange hangs."""
        ...


@contextmanager
def computed_by_all(given: StepInput, workers: TPWorkers) -> Iterator[None]:
    """While entered, this rank computes a step and waits for it, and the workers compute it.

    Raises ExchangeError if this rank fails, as the workers may wait for it.
    """
    workers.compute(given)
    try:
        with workers.waiting():
            yield
    except Exception as e:
        raise ExchangeError(f"rank 0 failed in a step: {type(e).__name__}: {first_line(e)}") from e
