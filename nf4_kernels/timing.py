"""Clocks of the NF4 work: seconds spent in dequantization, and in linear layers as a whole.

CPU: monotonic wall time, taken by the library around every call. dequant counts dequantize calls and, within linear, the
stages that expand weights into a panel of their own. CUDA: the device's own clock, read by the kernels themselves
(cuda/device_clock.py). There dequant counts the dequantize launches, those in front of cuBLAS included, and of each GEMM
that decodes weights itself the share that sampled launches spend decoding; on CPU such a GEMM counts under linear only.
linear counts linear layers from end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from nf4_kernels import cpu
from nf4_kernels.cuda.device_clock import DeviceClock


@dataclass(frozen=True)
class KernelTimes:
    """Seconds since the clock began; take the difference of two readings."""

    dequant: float = 0.0
    linear: float = 0.0
    by_kernel: dict[str, float] = field(default_factory=dict)
    """Seconds in linear layers by the kernel that runs them, and in dequantization."""


def read_cpu() -> KernelTimes:
    """The CPU library's clock in this process."""
    dequant, linear = cpu.clock()
    return KernelTimes(dequant, linear, {"cpu_linear": linear, "cpu_dequantize": dequant})


def reader_of(clock: DeviceClock) -> Callable[[], KernelTimes]:
    """A function that reads the totals that a device's clock noted last."""

    @lru_cache(maxsize=1)
    def read_once(_notes: int) -> KernelTimes:
        seconds = clock.seconds()
        by_kernel = {f"cuda_{kind}": value for kind, value in seconds.items()}
        decoding = clock.decoding()
        by_kernel |= {f"cuda_{kind}_dequantize": value for kind, value in decoding.items()}
        dequant = seconds["dequantize"] + sum(decoding.values())
        return KernelTimes(dequant, sum(seconds.values()) - seconds["dequantize"], by_kernel)

    return lambda: read_once(clock.notes)
