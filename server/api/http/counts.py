"""Counts of what is under way, of all API processes together: sequences, prompts' tokens, connections, requests of each key.

One process counts in its own memory, several in a file that they map: a row for each. A row is written by its process only,
and is cleared when that process has died, so that nothing stays counted for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import time
from collections.abc import Iterator
from pathlib import Path

SEQUENCES, TOKENS, CONNECTIONS, FIRST_KEY = range(4)
"""Columns; keys have one each from FIRST_KEY on."""
LATEST = 64
"""Ends of sequences whose times are kept."""
_BYTES = 8


class Counts:
    """Numbers of several processes. Within locked() nobody else changes any; the lock of a process that dies is free."""

    def __init__(self, keys: int = 0, processes: int = 1, row: int = 0, file: Path | None = None) -> None:
        """keys: how many API keys there are.

        row: this process's row. file: the file that all processes map, made by create().
        """
        self._columns = FIRST_KEY + keys
        self._processes = processes
        self._row = row
        self._file = None if file is None else file.open("r+b")
        size = _size(keys, processes)
        self._memory = mmap.mmap(-1 if self._file is None else self._file.fileno(), size)
        self._numbers = memoryview(self._memory).cast("q")
        self._ring = processes * self._columns

    @staticmethod
    def create(file: Path, keys: int, processes: int) -> None:
        """Write the file that processes map, with zeros. Raises OSError."""
        file.write_bytes(bytes(_size(keys, processes)))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, for microseconds only, because the event loop waits meanwhile. It is not reentrant."""
        if self._file is None:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def total(self, column: int) -> int:
        """The sum of a column over all processes."""
        if self._processes == 1:
            return self._numbers[column]
        return sum(self._numbers[row * self._columns + column] for row in range(self._processes))

    def add(self, column: int, number: int) -> None:
        """Add to this process' number."""
        self._numbers[self._row * self._columns + column] += number

    def clear(self, row: int) -> None:
        """Forget what a process has counted, once it has ended."""
        with self.locked():
            for column in range(self._columns):
                self._numbers[row * self._columns + column] = 0

    def ended(self, count: int) -> None:
        """Note that so many sequences have ended now; call it within locked()."""
        now = time.monotonic_ns()  # the clock of all processes of a Linux machine
        for _ in range(min(count, LATEST)):
            number = self._numbers[self._ring]
            self._numbers[self._ring + 1 + number % LATEST] = now
            self._numbers[self._ring] = number + 1

    def forget_ends(self) -> None:
        """Note that nothing is under way: what ended before says nothing of what follows. Call it within locked()."""
        self._numbers[self._ring] = 0

    def seconds_per_end(self) -> float | None:
        """Mean time between the latest ends of sequences; None before there were two since nothing was under way."""
        number = self._numbers[self._ring]
        known = min(number, LATEST)
        if known < 2:
            return None
        oldest = self._numbers[self._ring + 1 + (number - known) % LATEST]
        return (time.monotonic_ns() - oldest) / 1e9 / known


def _size(keys: int, processes: int) -> int:
    return _BYTES * (processes * (FIRST_KEY + keys) + 1 + LATEST)
