"""Metrics of several API processes as those of one server: prometheus_client's multiprocess mode.

Every process has its counters and histograms in a file that it maps, named after its process id. The process that is asked
adds up all files, including those of processes that have ended, so that no counter ever decreases.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from server.observability.value_files import VARIABLE


class Processes:
    """All API processes of a server, as far as metrics go."""

    def __init__(self, folder: Path, alive: Callable[[], Mapping[int, int]]) -> None:
        """folder: the one that keep_values_in() was called with. alive: process ids by number, the first one's under 0."""
        if os.environ.get(VARIABLE) != str(folder):
            raise RuntimeError(f"{VARIABLE} has to name {folder} before prometheus_client is imported")
        self._folder = folder
        self._alive = alive

    def collect_into(self, registry: CollectorRegistry) -> None:
        """Register what collects the values of all processes."""
        MultiProcessCollector(registry, path=str(self._folder))  # type: ignore[no-untyped-call]
        registry.register(_Resources(self._alive))

    def ended(self, pid: int) -> None:
        """Remove an ended process's share from gauges; its counters stay."""
        mark_process_dead(pid, path=str(self._folder))  # type: ignore[no-untyped-call]


class _Resources(Collector):
    """process_* of each process, with its number in the label api_process, and how many there are."""

    def __init__(self, alive: Callable[[], Mapping[int, int]]) -> None:
        self._alive = alive

    def collect(self) -> Iterator[Metric]:
        alive = self._alive()
        yield GaugeMetricFamily("nf4_api_processes", "Processes that answer HTTP.", value=len(alive))
        families: dict[str, Metric] = {}
        for number, pid in sorted(alive.items()):
            for metric in ProcessCollector(pid=partial(int, pid), registry=None).collect():
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.samples.append(sample._replace(labels={**sample.labels, "api_process": str(number)}))
        yield from families.values()
