"""The clocks of this process's devices, with which launches leave their times (device_clock.py)."""

from __future__ import annotations

import torch

from nf4_kernels.cuda.device import index_of
from nf4_kernels.cuda.device_clock import DeviceClock
from nf4_kernels.cuda.library import usable

_clocks: dict[int, DeviceClock] = {}


def start_clock(device: torch.device) -> DeviceClock:
    """From here on every launch on device leaves its time with the clock returned; whoever starts it collects."""
    clock = _clocks[index_of(device)] = DeviceClock(device, usable())
    return clock


def stop_clock(device: torch.device) -> None:
    """Undo start_clock(). Graphs captured in between keep writing their times: keep their clock as long as they live."""
    _clocks.pop(index_of(device), None)


def clock_words(device: torch.device, kind: str) -> tuple[int | None, bool]:
    """Place at which a launch of that kind leaves its time, None if no clock runs; whether its decoding is timed, too."""
    clock = _clocks.get(device.index or 0) if _clocks else None
    return (None, False) if clock is None else clock.take(kind)
