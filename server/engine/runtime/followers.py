"""The other ranks of tensor parallelism, as rank 0's runner sees them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from server.engine.runtime.exchange import ExchangeError
from server.engine.runtime.graphs.launched_step import Launch
from server.engine.runtime.step_input import StepInput
from server.engine.runtime.trials import first_line


class Followers(Protocol):
    """The other ranks of tensor parallelism, which compute every step that this one computes."""

    def compute(self, given: StepInput) -> None:
        """Begin to compute a step."""
        ...

    def decode(self, given: StepInput, launch: Launch) -> None:
        """Begin to compute a step whose tokens are sampled on the device."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Enter this while this rank waits for a step: if that takes too long, an exchange hangs."""
        ...


@contextmanager
def followed(given: StepInput, followers: Followers) -> Iterator[None]:
    """While entered, this rank computes a step and waits for it, and the others compute it.

    Raises ExchangeError where this one fails, while others may wait for it.
    """
    followers.compute(given)
    try:
        with followers.waiting():
            yield
    except Exception as e:
        raise ExchangeError(f"rank 0 failed in a step: {type(e).__name__}: {first_line(e)}") from e
