"""Where time goes: per step, and each request's share of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from nf4_kernels import timing
from server.types import RequestTimings


@dataclass
class RequestClock:
    """One request's times so far, in seconds; moments are of time.perf_counter()."""

    arrived: float
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    dequant_prefill: float = 0.0
    dequant_decode: float = 0.0
    linear_prefill: float = 0.0
    linear_decode: float = 0.0

    def schedule(self, now: float) -> None:
        """Note that the request is part of a step."""
        if self.scheduled is None:
            self.scheduled = now

    def token(self, now: float) -> None:
        """Note that the request got a token."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now

    def timings(self) -> RequestTimings:
        """The totals, for a request that got at least one token."""
        scheduled = self.arrived if self.scheduled is None else self.scheduled
        first = scheduled if self.first_token is None else self.first_token
        last = first if self.last_token is None else self.last_token
        return RequestTimings(
            queue=scheduled - self.arrived,
            prefill=first - scheduled,
            decode=last - first,
            dequant_prefill=self.dequant_prefill,
            dequant_decode=self.dequant_decode,
            linear_prefill=self.linear_prefill,
            linear_decode=self.linear_decode,
        )


class StepClock:
    """Times one step after another; the kernels' own clocks are read at its ends."""

    def __init__(self) -> None:
        self.started = 0.0
        self.stopped = 0.0
        self.dequant_total = 0.0
        self.linear_total = 0.0
        self._before = (0.0, 0.0)
        self._dequant = 0.0
        self._linear = 0.0

    @property
    def seconds(self) -> float:
        """Length of the last step."""
        return self.stopped - self.started

    def start(self) -> None:
        """A step begins."""
        self._before = timing.read()
        self.started = time.perf_counter()

    def stop(self) -> None:
        """The step has ended; its results are on the host."""
        self.stopped = time.perf_counter()
        dequant, linear = timing.read()
        self._dequant, self._linear = dequant - self._before[0], linear - self._before[1]
        self.dequant_total += self._dequant
        self.linear_total += self._linear

    def share(self, taken: Mapping[str, tuple[int, bool]], clocks: Mapping[str, RequestClock]) -> None:
        """Divide the step's kernel times among its requests: request id to (tokens, whether it was decoding)."""
        tokens = sum(count for count, _ in taken.values())
        for request_id, (count, decoding) in taken.items():
            clock, share = clocks[request_id], count / tokens
            if decoding:
                clock.dequant_decode += self._dequant * share
                clock.linear_decode += self._linear * share
            else:
                clock.dequant_prefill += self._dequant * share
                clock.linear_prefill += self._linear * share
