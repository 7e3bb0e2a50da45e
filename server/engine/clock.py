"""Time per step, and each request's share of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from nf4_kernels.timing import KernelTimes
from server.types import RequestTimings


@dataclass(slots=True)
class RequestClock:
    """One request's times so far, in seconds, and its draft tokens; moments are of time.perf_counter()."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    queue: float = 0.0
    """Seconds until it was scheduled; known with its first token, as is the next one."""
    prefill: float = 0.0
    """Seconds from there to its first token."""
    dequant_prefill: float = 0.0
    dequant_decode: float = 0.0
    linear_prefill: float = 0.0
    linear_decode: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def schedule(self, now: float) -> None:
        """Note that the request is part of a step."""
        if self.scheduled is None:
            self.scheduled = now

    def token(self, now: float) -> RequestTimings:
        """Note that the request got a token; the totals."""
        if self.first_token is None:
            self.first_token = now
            scheduled = self.arrived if self.scheduled is None else self.scheduled
            self.queue, self.prefill = scheduled - self.arrived, now - scheduled
        return RequestTimings(
            self.queue,
            self.prefill,
            now - self.first_token,
            self.dequant_prefill,
            self.dequant_decode,
            self.linear_prefill,
            self.linear_decode,
            self.draft_tokens,
            self.accepted_tokens,
        )


class StepClock:
    """Times one step after another. read() gives the kernels' own clocks as of the end of the step that stop() ends.

    It is read when it is asked for: the device may wait for what the host does behind stop().
    """

    def __init__(self, read: Callable[[], KernelTimes]) -> None:
        self._read = read
        self.started = 0.0
        self.stopped = 0.0
        self.seconds = 0.0
        """Length of the last step that has ended."""
        self._kernels = self._before = KernelTimes()
        # Whether the clocks have not been read since the last step ended, and whether the next one has begun since.
        self._is_unread = self._goes_on = False
        self._dequant = 0.0
        self._linear = 0.0

    def start(self) -> None:
        """Note that a step begins."""
        self._goes_on = self._is_unread
        if not self._is_unread:
            self._before = self._read()
        self.started = time.perf_counter()

    def stop(self) -> None:
        """Note that the step has ended; its results are on the host."""
        self.stopped = time.perf_counter()
        self.seconds = self.stopped - self.started
        self._is_unread = True

    @property
    def kernels(self) -> KernelTimes:
        """Since the process began, at the end of the last step."""
        self._look()
        return self._kernels

    def shares(self, tokens: int) -> tuple[float, float]:
        """A token's share of the last step's kernel times, if so many have one: dequantization, all of linear layers.

        It has to be asked for before the next step ends.
        """
        self._look()
        return self._dequant / tokens, self._linear / tokens

    def _look(self) -> None:
        if not self._is_unread:
            return
        self._is_unread = False
        self._kernels = self._read()
        self._dequant = self._kernels.dequant - self._before.dequant
        self._linear = self._kernels.linear - self._before.linear
        if self._goes_on:
            self._before = self._kernels
