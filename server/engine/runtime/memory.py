"""GPU memory that the KV cache may take (what a largest step leaves free), and memory in use."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

# The reserve is for CUDA graphs, code of kernels, and memory between tensors of different sizes that the allocator cannot
# use.
RESERVED_SHARE = 0.03
# Windows that are opened later take more than the screen had when the server started.
SCREEN_BYTES = 2**29
_KERNEL_EXEC_TIMEOUT = 17  # CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT


def reserve(device: torch.device, total: int) -> int:
    """Bytes of a CUDA device with `total` bytes that stay free, more if it drives a screen."""
    return int(total * RESERVED_SHARE) + (SCREEN_BYTES if drives_screen(device.index or 0) else 0)


@functools.cache
def drives_screen(index: int) -> bool:
    """Whether the driver bounds the time of a GPU's kernels, as it does while the GPU drives a screen."""
    found, device = ctypes.c_int(0), ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    if driver.cuDeviceGet(ctypes.byref(device), index):
        return False
    failed = driver.cuDeviceGetAttribute(ctypes.byref(found), _KERNEL_EXEC_TIMEOUT, device)
    return not failed and found.value == 1


def share_for_cache(free: int, reserved: int, step: int) -> int:
    """Bytes for the cache: the free bytes less those of a step and of the reserve; 0 when nothing is left."""
    return max(0, free - step - reserved)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a device had no memory left; libraries and the driver say so in plain RuntimeErrors."""
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in said or "status_alloc_failed" in said)
    )


def measure_step(run: Callable[[], int], device: torch.device) -> int:
    """The most bytes that run() holds at once, less those that run() says are not the step's own.

    Everything that run() allocates must be free when it returns.
    """
    settle(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    others = run()
    peak = torch.cuda.max_memory_allocated(device)
    settle(device)
    return peak - before - others


def cache_bytes(run: Callable[[], int], device: torch.device) -> int:
    """Bytes for the cache on a CUDA device that holds the weights already; run() as for measure_step()."""
    step = measure_step(run, device)
    free, total = torch.cuda.mem_get_info(device)
    found = share_for_cache(free, reserve(device, total), step)
    logger.info(
        "memory: %.2f GiB of %.2f free beside the weights, %.2f for a largest step, %.2f for the KV cache",
        free / 2**30,
        total / 2**30,
        step / 2**30,
        found / 2**30,
    )
    return found


def pin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pin a contiguous tensor in host memory where it is, if device is a GPU. Raises RuntimeError if that fails.

    torch's own pinned memory has sizes of powers of two.
    """
    if device.type == "cuda" and tensor.nbytes:
        runtime: Any = torch.cuda.cudart()
        if code := int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)):
            raise RuntimeError(f"cudaHostRegister of {tensor.nbytes} bytes fails with {code}")
    return tensor


class MemoryGauge:
    """Bytes in use and in all, read from the driver once a second at most because that takes time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known = (0, 0)
        self._read_at = float("-inf")

    def read(self) -> tuple[int, int]:
        """(used, total) of a CUDA device, other processes included; on CPU this process's memory, and the machine's."""
        now = time.monotonic()
        if now - self._read_at >= 1.0:
            self._read_at = now
            self._known = self._ask()
        return self._known

    def _ask(self) -> tuple[int, int]:
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free, total
        page = os.sysconf("SC_PAGE_SIZE")
        with open("/proc/self/statm") as f:
            resident = int(f.read().split()[1])
        return resident * page, os.sysconf("SC_PHYS_PAGES") * page


def settle(device: torch.device) -> None:
    """Wait for a CUDA device, and give the memory that torch keeps for later tensors back, so that it counts as free."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
