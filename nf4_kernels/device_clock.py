"""Device time of the NF4 launches, taken by the kernels themselves, inside CUDA graphs too.

A launch leaves when it began (once what it reads was there) and ended in a pair of words of its own; collect() adds the
pairs up by kind in one small launch. Pairs of captured launches belong to their graph: its replays fill them again. All
other pairs are free again once they are collected. Times come from the GPU's global timer. They leave out about a
microsecond of a launch's start and end that profilers count: 11.0 us a product where torch.profiler has 12.2 (12800 x 5120,
one row, an H200), 395 and 387 for 2048 rows.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

KINDS = ("rows", "wgmma", "slices", "dequantize")
"""Linear layers by what runs them (slices: dequantize + cuBLAS), and dequantize launches, those of slices included."""
CAPACITY = 1 << 15
"""Pairs of each kind."""


class Clocks(ctypes.Structure):
    """Nf4Clocks of params.h."""

    _fields_ = (("first", ctypes.c_void_p * len(KINDS)), ("count", ctypes.c_int32 * len(KINDS)))


class DeviceClock:
    """The pairs and totals of one device. Not thread-safe; launches of one stream at a time."""

    def __init__(self, device: torch.device, library: ctypes.CDLL) -> None:
        self._library = library
        with torch.inference_mode(False):
            self._pairs = torch.zeros(len(KINDS), CAPACITY, 2, dtype=torch.int64, device=device)
            self.totals = torch.zeros(len(KINDS), dtype=torch.int64, device=device)
        """int64 [len(KINDS)], nanoseconds, on the device: sums of what has been collected."""
        self._kept = [0] * len(KINDS)
        self._next = [0] * len(KINDS)
        self._known = [0] * len(KINDS)

    def take(self, kind: str) -> int | None:
        """Address of a pair for one launch; None when all are taken, which is said once: the launch goes uncounted."""
        index = KINDS.index(kind)
        place = self._next[index]
        if place >= CAPACITY:
            if place == CAPACITY:
                self._next[index] += 1
                logger.warning("the device clock has no room for more %s launches; they are not counted", kind)
            return None
        self._next[index] += 1
        return self._pairs.data_ptr() + (index * CAPACITY + place) * 16

    def collect(self) -> None:
        """Add the pairs taken since the last call to the totals, on the current stream; captured, at every replay."""
        clocks = Clocks()
        taken = 0
        for index in range(len(KINDS)):
            first, last = self._kept[index], min(self._next[index], CAPACITY)
            clocks.first[index] = self._pairs.data_ptr() + (index * CAPACITY + first) * 16
            clocks.count[index] = last - first
            taken += last - first
        if torch.cuda.is_current_stream_capturing():
            self._kept = [min(place, CAPACITY) for place in self._next]
        self._next = list(self._kept)
        if taken:
            stream = torch.cuda.current_stream(self._pairs.device).cuda_stream
            status = self._library.nf4_cuda_clock_collect(ctypes.byref(clocks), self.totals.data_ptr(), stream)
            if status:
                raise RuntimeError(f"the device clock cannot be read (CUDA error {status})")

    def note(self, totals: Tensor | Sequence[int]) -> None:
        """Remember a reading of totals that has reached the host."""
        self._known = [int(value) for value in (totals.tolist() if isinstance(totals, Tensor) else totals)]

    def seconds(self) -> dict[str, float]:
        """The totals as last noted, by kind."""
        return {kind: value * 1e-9 for kind, value in zip(KINDS, self._known, strict=True)}
