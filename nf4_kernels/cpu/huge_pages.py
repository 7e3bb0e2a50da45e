"""Host memory in huge pages: what is read once in every step has too many small pages for the CPU's tables of them."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
_ALIGNMENT = 64
_CHUNK = 32 * HUGE_PAGE


def zero_bytes(size: int) -> Tensor:
    """A uint8 tensor of `size` zeros, whose pages exist once they are touched: huge ones where the system has them.

    OSError where the system has no memory for it.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    # The memory is private: what processes could share is kept like a file, which has small pages on most systems.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    # Whole huge pages, because Linux aligns those alone such that all their pages can be huge.
    pages = mmap.mmap(-1, -(-max(1, size) // HUGE_PAGE) * HUGE_PAGE, flags=flags)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:size]


class HugePages:
    """Tensors side by side in huge pages, which live as long as one of the tensors does."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of zeros on the CPU, aligned to 64 bytes. OSError where there is no memory."""
        size = math.prod(shape) * dtype.itemsize
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if padded > self._free.numel():
            self._free = zero_bytes(max(padded, _CHUNK))
        taken, self._free = self._free[:size], self._free[padded:]
        return taken.view(dtype).view(tuple(shape))

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a tensor on the CPU, aligned to 64 bytes; the tensor itself where there is no memory."""
        try:
            return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)
        except OSError:
            return tensor
