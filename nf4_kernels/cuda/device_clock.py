"""Device time of the NF4 launches, taken by the kernels themselves, inside CUDA graphs too.

A launch leaves when it began (when the launch before it had ended) and when its last instruction ran; collect() adds the
launches up by kind in one small launch. The words of captured launches belong to their graph: its replays fill them again.
All others are free again once they are collected. Times come from the GPU's global timer (32 ns a step on an H200). A
launch cannot see how long it takes from its last instruction until it counts as ended: 0.6 us on an H200. From
capability 9.0 on, that time is measured when the clock starts, and added to every launch.

One launch in SAMPLING of those that decode weights within the GEMM, if it is of bfloat16 and neither normalises nor gates,
also leaves how long one of its warps decoded: read codes and scales from shared memory, looked codes up, put scales on the
sums. That warp waits for each stage to end before it begins the next; in all other warps stages overlap.
"""

from __future__ import annotations

import ctypes
import logging
import statistics

import torch
from torch import Tensor

from nf4_kernels.cuda.device import capability

logger = logging.getLogger(__name__)

KINDS = ("rows", "wgmma", "slices", "dequantize")
"""Linear layers by what runs them (slices: dequantize + cuBLAS), and dequantize launches, those of slices included."""
FUSED = ("rows", "wgmma")
"""Kinds that decode within the GEMM."""
CAPACITY = 1 << 15
"""Launches of each kind."""
WORDS = 4
"""NF4_CLOCK_WORDS of params.h: int64 words of a launch."""
TOTALS = 3
"""NF4_CLOCK_TOTALS of params.h: for a kind, the nanoseconds of all launches, of the sampled ones, and of their decoding."""
SAMPLING = 127
"""A launch whose decoding is timed takes up to 70 % longer.

The number is prime because a layer's GEMMs come in a fixed order.
"""
WINDOW = 500_000
"""Nanoseconds of sampled launches that the share of decoding is taken from: about the last 50."""


class Clocks(ctypes.Structure):
    """Nf4Clocks of params.h."""

    _fields_ = (
        ("first", ctypes.c_void_p * len(KINDS)),
        ("count", ctypes.c_int32 * len(KINDS)),
        ("completion", ctypes.c_int32 * len(KINDS)),
    )


class DecodingShare:
    """Estimate how long launches of a kind decoded, by the decoding's share of the latest sampled ones."""

    def __init__(self) -> None:
        self.nanoseconds = 0.0
        """Decoding so far."""
        self._sampled = 0.0
        self._decoded = 0.0
        self._unknown = 0

    def add(self, spent: int, sampled: int, decoded: int) -> None:
        """Count launches of `spent` nanoseconds; the sampled ones among them took `sampled` and decoded for `decoded`."""
        kept = max(0.0, 1 - sampled / WINDOW)
        self._sampled = self._sampled * kept + sampled
        self._decoded = self._decoded * kept + decoded
        self._unknown += spent
        if self._sampled:
            self.nanoseconds += self._unknown * min(1.0, self._decoded / self._sampled)
            self._unknown = 0


class DeviceClock:
    """The words and totals of one device. Not thread-safe; launches of one stream at a time."""

    def __init__(self, device: torch.device, library: ctypes.CDLL) -> None:
        self._library = library
        with torch.inference_mode(False):
            self._words = torch.zeros(len(KINDS), CAPACITY, WORDS, dtype=torch.int64, device=device)
            self.totals = torch.zeros(len(KINDS), TOTALS, dtype=torch.int64, device=device)
        """int64 [len(KINDS), TOTALS], nanoseconds, on the device: sums of what has been collected."""
        self._kept = [0] * len(KINDS)
        self._next = [0] * len(KINDS)
        self._known = [[0] * TOTALS for _ in KINDS]
        self._noted: Tensor | None = None
        self.notes = 0
        """Number of totals noted."""
        self._decoding = {kind: DecodingShare() for kind in FUSED}
        self._fused = 0
        self.completion = self._measure_completion(device)
        """Nanoseconds from a launch's last instruction to its end; 0 before capability 9.0."""

    def take(self, kind: str) -> tuple[int | None, bool]:
        """The address of one launch's words, and whether it is to time its decoding.

        There is no address when all words are taken; a warning says so once, and the launch is not counted.
        """
        index = KINDS.index(kind)
        place = self._next[index]
        if place >= CAPACITY:
            if place == CAPACITY:
                self._next[index] += 1
                logger.warning("the device clock has no room for more %s launches; they are not counted", kind)
            return None, False
        self._next[index] += 1
        self._fused += kind in FUSED
        return self._address(index, place), kind in FUSED and self._fused % SAMPLING == 0

    def collect(self) -> None:
        """Add what launches left since the last call to the totals, on the current stream; captured, at every replay."""
        clocks = Clocks()
        taken = 0
        for index, kind in enumerate(KINDS):
            first, last = self._kept[index], min(self._next[index], CAPACITY)
            clocks.first[index] = self._address(index, first)
            clocks.count[index] = last - first
            # Slices end with a launch of their own, which begins when they have ended.
            clocks.completion[index] = 0 if kind == "slices" else self.completion
            taken += last - first
        if torch.cuda.is_current_stream_capturing():
            self._kept = [min(place, CAPACITY) for place in self._next]
        self._next = list(self._kept)
        if taken:
            stream = torch.cuda.current_stream(self._words.device).cuda_stream
            status = self._library.nf4_cuda_clock_collect(ctypes.byref(clocks), self.totals.data_ptr(), stream)
            self._check(status)

    def note(self, totals: Tensor) -> None:
        """Remember a reading of totals, on the host or not, which is looked at when it is asked for.

        What is on the host must not change any more.
        """
        self._noted = totals.cpu() if totals.is_cuda else totals
        self.notes += 1

    def _look(self) -> None:
        if self._noted is None:
            return
        known, self._noted = self._noted.tolist(), None
        for index, kind in enumerate(KINDS):
            if kind in FUSED:
                self._decoding[kind].add(
                    *(new - old for new, old in zip(known[index], self._known[index], strict=True))
                )
        self._known = known

    def seconds(self) -> dict[str, float]:
        """The launches' times as last noted, by kind."""
        self._look()
        return {kind: self._known[index][0] * 1e-9 for index, kind in enumerate(KINDS)}

    def decoding(self) -> dict[str, float]:
        """Seconds of decoding as last noted, by kind of FUSED; 0 until a launch of the kind has been sampled."""
        self._look()
        return {kind: share.nanoseconds * 1e-9 for kind, share in self._decoding.items()}

    def _address(self, index: int, place: int) -> int:
        return self._words.data_ptr() + (index * CAPACITY + place) * WORDS * 8

    def _measure_completion(self, device: torch.device) -> int:
        if capability(device)[0] < 9:
            return 0
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        stream = torch.cuda.current_stream(device)
        written = torch.empty(blocks * 256, device=device)
        found = []
        for _ in range(33):
            words = torch.zeros(2, WORDS, dtype=torch.int64, device=device)
            arguments = (words.data_ptr(), written.data_ptr(), blocks, stream.cuda_stream)
            self._check(self._library.nf4_cuda_clock_completion(*arguments))
            (_, ended), (waited, _) = words[:, :2].tolist()
            found.append(waited - ended)
        return max(0, int(statistics.median(found)))

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"the device clock cannot be read (CUDA error {status})")
