"""Large tensors of zeros in host memory, whose pages a background thread faults in during the rest of the start."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
from collections.abc import Sequence

import torch

from nf4_kernels.cpu.huge_pages import HUGE_PAGE, zero_bytes

PAGES_THREAD = "cache-pages"
"""Name of the thread that faults the pages in."""
# Of a tensor, in bytes: a cache line, and a multiple of every dtype's size.
_ALIGNMENT = 64
# Linux's number, from kernel 5.14 on, for faulting pages in as if they were written; mmap has no name for it.
_MADV_POPULATE_WRITE = 23


def host_zeros(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of zeros. A background thread faults their pages in from now on, where a write has not done it before.

    A GiB takes seconds. Huge pages are used where the system has them.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    # They lie side by side, because each mapping ends in a huge page of its own, of which a small tensor fills little.
    places = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    memory = zero_bytes(sum(places))
    # The thread holds the memory until it is done, and so that is not given back under it.
    threading.Thread(target=_populate, args=(memory,), name=PAGES_THREAD, daemon=True).start()
    parts = zip(memory.split(places), sizes, shapes, strict=True)
    return [part[:size].view(dtype).view(shape) for part, size, shape in parts]


def _populate(memory: torch.Tensor) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin, size = memory.data_ptr(), memory.numel()
    # The pages are faulted in part by part, because each call blocks other threads that change the address space.
    for offset in range(0, size, HUGE_PAGE):
        if madvise(begin + offset, min(HUGE_PAGE, size - offset), _MADV_POPULATE_WRITE):
            return
