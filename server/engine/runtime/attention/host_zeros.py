"""Large tensors of zeros in host memory, whose pages a background thread faults in during the rest of the start."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
from collections.abc import Sequence

import torch

from nf4_kernels.huge_pages import HUGE_PAGE, zero_bytes

PAGES_THREAD = "cache-pages"
"""Name of the thread that faults the pages in."""
# Linux's number, from kernel 5.14 on, for faulting pages in as if they were written; mmap has no name for it.
_MADV_POPULATE_WRITE = 23


def host_zeros(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of zeros. A background thread faults their pages in from now on, where a write has not done it before.

    A GiB takes seconds. Huge pages are used where the system has them.
    """
    tensors = [zero_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape) for shape in shapes]
    # The thread holds the tensors until it is done, and so their memory is not given back under it.
    threading.Thread(target=_populate, args=(tensors,), name=PAGES_THREAD, daemon=True).start()
    return tensors


def _populate(tensors: list[torch.Tensor]) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for tensor in tensors:
        begin, size = tensor.data_ptr(), tensor.numel() * tensor.itemsize
        # The pages are faulted in part by part, because each call blocks other threads that change the address space.
        for offset in range(0, size, HUGE_PAGE):
            if madvise(begin + offset, min(HUGE_PAGE, size - offset), _MADV_POPULATE_WRITE):
                return
