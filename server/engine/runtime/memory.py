"""How much of a GPU's memory the KV cache may take: what a largest step leaves free."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

# For CUDA graphs, compiled code, and what the allocator cannot use between tensors of different sizes.
RESERVED_SHARE = 0.03


def share_for_cache(free: int, total: int, step: int) -> int:
    """Bytes for the cache: free ones of total, less those that a step needs and a reserve. 0 when nothing is left."""
    return max(0, free - step - int(total * RESERVED_SHARE))


def measure_step(run: Callable[[], int], device: torch.device) -> int:
    """The most bytes that run() has allocated at once, less what it returns: the bytes that are not the step's own.

    Everything that run() allocates must be free when it returns.
    """
    _settle(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    others = run()
    peak = torch.cuda.max_memory_allocated(device)
    _settle(device)
    return peak - before - others


def cache_bytes(run: Callable[[], int], device: torch.device) -> int:
    """Bytes for the cache on a CUDA device that holds the weights already; run() as measure_step() wants it."""
    step = measure_step(run, device)
    free, total = torch.cuda.mem_get_info(device)
    found = share_for_cache(free, total, step)
    logger.info(
        "memory: %.2f GiB of %.2f free beside the weights, %.2f for a largest step, %.2f for the KV cache",
        free / 2**30,
        total / 2**30,
        step / 2**30,
        found / 2**30,
    )
    return found


def _settle(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
