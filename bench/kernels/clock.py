"""Clocks launches on this machine's GPU, inside CUDA graphs or between events, with a cold L2."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

_FLUSH_BYTES = 256 << 20
_REPLAYS = 9
_WARM_UP = 20  # enough for the clocks to rise


class Bench:
    """Clocks launches on the current device with a cold L2."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._flush = torch.randn(_FLUSH_BYTES // 4, device="cuda")
        self._flush_us = 0.0
        self._replay([None])
        self._flush_us = self._replay([None])[0]
        a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
        b = torch.empty_like(a)
        self.copy_bytes_per_us: float = 2 * a.numel() / self.time_alone(partial(b.copy_, a))
        del a, b
        x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
        self.flops_per_us: float = 2.0 * 8192**3 / self.time_alone(lambda: x @ x)

    def time(self, *launches: Callable[[], object]) -> list[float]:
        """Median microseconds of each launch inside a CUDA graph, as a serving engine replays it, with a cold L2.

        The launches take turns, and each comes first equally often: where power is short, a launch slows down the next one.
        """
        return [(replay - self._flush_us) / self.repeats for replay in self._replay(launches)]

    def time_alone(self, launch: Callable[[], object]) -> float:
        """Median microseconds of a launch between two events, with a cold L2: for launches that write more than L2 holds.

        What lies in L2 at their end is written back while the next launch runs; that is so for the copy that gives the
        floor, too.
        """
        launch()
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(self.repeats)
        ]
        for begin, end in events:
            torch.amax(self._flush)
            begin.record()
            launch()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(float(begin.elapsed_time(end)) * 1e3 for begin, end in events)

    def warm_up(self) -> None:
        """Read memory for half a second. The first launches after a pause are slower: up to 8 us, a quarter, were seen."""
        deadline = time.perf_counter() + 0.5
        while time.perf_counter() < deadline:
            for _ in range(20):
                torch.amax(self._flush)
            torch.cuda.synchronize()

    def _replay(self, launches: Sequence[Callable[[], object] | None]) -> list[float]:
        """Median microseconds of one replay of `repeats` flushes, each followed by the launch, for each of launches."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graphs = [self._capture(launch, stream) for launch in launches]
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            taken: list[list[float]] = [[] for _ in graphs]
            for turn in range(_WARM_UP + _REPLAYS):
                for place in range(len(graphs)):
                    which = (turn + place) % len(graphs)
                    begin.record(stream)
                    graphs[which].replay()
                    end.record(stream)
                    stream.synchronize()
                    taken[which].append(float(begin.elapsed_time(end)) * 1e3)
        return [statistics.median(times[_WARM_UP:]) for times in taken]

    def _capture(self, launch: Callable[[], object] | None, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        if launch:
            launch()
            launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(self.repeats):
                torch.amax(self._flush)
                if launch:
                    launch()
        return graph

    def floor(self, moved_bytes: float, flops: float = 0.0) -> float:
        return max(moved_bytes / self.copy_bytes_per_us, flops / self.flops_per_us)
