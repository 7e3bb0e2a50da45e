"""Contention: other work takes the cores, and threads that spin at barriers keep those that they wait for from running.

On two cores with as much other work again, decode with two spinning threads is a tenth as fast as with one thread; with
threads that sleep at barriers it is about as fast, or faster. On idle cores waking them costs more than spinning.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch

from nf4_kernels import cpu

logger = logging.getLogger(__name__)

CHECK_S = 0.25
"""Seconds between two checks; one reads a line of every thread."""
CONTENDED_SHARE = 0.15
"""Threads sleep if one of them has waited for a core for more than this share of the time."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 16.0
"""Seconds without contention and with free cores before threads spin again; they double each time that this was wrong."""
PAUSE_PER_LATE = 10.0
"""The pause is at least this many times as long as contention was found too late: a step in between may take seconds."""
MAX_SLEEP_S = 60.0
"""Seconds after which they do in any case; that may be one step that takes many times as long as others."""

_sleeps = ContextVar("sleeps", default=False)


@contextmanager
def barriers(*, sleep: bool) -> Iterator[None]:
    """Have OpenMP's threads sleep at barriers while entered, or spin; may be nested. Nothing without the CPU library.

    A start's steps sleep: the API process and other ranks start with the engine, and on a machine whose cores are all busy
    a start takes 2.5 times as long if threads spin. On idle cores it takes the same time: its steps are few.
    """
    if cpu.load_error() is not None:
        yield
        return
    before = _sleeps.set(sleep)
    cpu.sleep_at_barriers(sleep)
    try:
        yield
    finally:
        _sleeps.reset(before)
        cpu.sleep_at_barriers(_sleeps.get())


def waited_seconds() -> dict[int, float]:
    """Time that each thread of this process was ready and had no core, by thread id; empty if the system does not say."""
    waited: dict[int, float] = {}
    if sys.platform != "linux":
        return waited
    for task in os.listdir("/proc/self/task"):
        try:
            waited[int(task)] = int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[1]) * 1e-9
        except (OSError, IndexError):  # it has ended, or there is no such file
            continue
    return waited


def free_cores() -> int:
    """Cores of the machine less other threads that run or wait for one; all of them if the system does not say."""
    cores = os.cpu_count() or 1
    try:
        runnable = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        return cores - (int(runnable) - 1)
    except (OSError, IndexError, ValueError):
        return cores


class Barriers:
    """Have OpenMP's threads sleep at barriers while there is contention. Call check() before every step."""

    def __init__(
        self,
        sleep: Callable[[bool], None] = cpu.sleep_at_barriers,
        waited: Callable[[], dict[int, float]] = waited_seconds,
        now: Callable[[], float] = time.monotonic,
        free: Callable[[], int] = free_cores,
    ) -> None:
        """sleep: whether threads sleep from here on; waited, free: see the functions above; now: in seconds."""
        self._sleep, self._waited, self._now, self._free = sleep, waited, now, free
        self._threads = torch.get_num_threads()
        self._checked_at = -1e9
        self._before: dict[int, float] = {}
        self._changed_at = -1e9
        self._pause_s = FIRST_PAUSE_S
        self._calm_s = 0.0
        self.sleeps = False
        """Whether threads sleep at barriers now."""

    @classmethod
    def checker(cls, device: str) -> Callable[[], None]:
        """check() for an engine on a device; nothing if it has one thread, or the system does not say what they wait for."""
        if device == "cpu" and torch.get_num_threads() > 1 and cpu.load_error() is None and waited_seconds():
            return cls().check
        return lambda: None

    def check(self) -> None:
        """Change how threads wait if that has become better."""
        now = self._now()
        seconds = now - self._checked_at
        if seconds < CHECK_S:
            return
        self._checked_at = now
        before, self._before = self._before, self._waited()
        longest = max((waited - before.get(task, waited) for task, waited in self._before.items()), default=0.0)
        contended = longest > CONTENDED_SHARE * seconds
        free, lasted = self._free(), now - self._changed_at
        if self.sleeps:
            # Threads that sleep wait for little even on busy cores: the system lets a thread that wakes go first.
            self._calm_s = 0.0 if contended else self._calm_s + (seconds if free >= self._threads else 0.0)
            if lasted > MAX_SLEEP_S or self._calm_s > self._pause_s:
                self._change(False, now)
        elif contended or free < 0:  # the first step after a pause may take seconds: there is no waiting for it
            is_new = lasted > MAX_PAUSE_S
            pause_s = FIRST_PAUSE_S if is_new else min(2 * self._pause_s, MAX_PAUSE_S)
            self._pause_s = max(pause_s, PAUSE_PER_LATE * (seconds - CHECK_S) if contended else 0.0)
            if is_new:
                logger.info("other work takes the cores: threads sleep at barriers until it has ended")
            self._change(True, now)

    def _change(self, sleeps: bool, now: float) -> None:
        self.sleeps, self._changed_at, self._calm_s = sleeps, now, 0.0
        self._sleep(sleeps)
