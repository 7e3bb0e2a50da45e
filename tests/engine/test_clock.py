"""The step's clock, which reads the kernels' own when it is asked for."""

from __future__ import annotations

import pytest

from nf4_kernels.timing import KernelTimes
from server.engine.clock import StepClock


class Kernels:
    """Kernels' clocks that are set by hand, and how often they have been read."""

    def __init__(self) -> None:
        self.dequant = self.linear = 0.0
        self.reads = 0

    def read(self) -> KernelTimes:
        self.reads += 1
        return KernelTimes(self.dequant, self.linear, {})

    def run(self) -> None:
        """Do a step's work."""
        self.dequant += 1.0
        self.linear += 4.0


def test_what_runs_between_two_steps_is_no_steps() -> None:
    kernels = Kernels()
    clock = StepClock(kernels.read)
    for _ in range(3):
        kernels.run()  # not in a step
        clock.start()
        kernels.run()
        clock.stop()
        assert clock.shares(2) == (0.5, 2.0)
    assert clock.kernels.dequant == 6.0


@pytest.mark.parametrize("asked", [True, False])
def test_kernels_are_read_behind_the_start_of_the_next_step(asked: bool) -> None:
    """As where a check's tokens are told when the next step has been launched."""
    kernels = Kernels()
    clock = StepClock(kernels.read)
    clock.start()
    for step in range(1, 4):
        kernels.run()
        before = kernels.reads
        clock.stop()
        clock.start()
        assert kernels.reads == before
        if asked:
            assert clock.shares(1) == (1.0, 4.0)
            assert clock.shares(4) == (0.25, 1.0)
            assert kernels.reads == before + 1
        assert clock.kernels.linear == 4.0 * step
