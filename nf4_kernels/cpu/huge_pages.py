"""Host memory in huge pages: what is read once in every step has too many small pages for the CPU's tables of them."""

from __future__ import annotations

import contextlib
import mmap

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
    """Copies tensors side by side into huge pages, which live as long as one of the copies does."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a tensor on the CPU, aligned to 64 bytes; the tensor itself where there is no memory."""
        size = tensor.numel() * tensor.element_size()
        padded = -(-size // _ALIGNMENT) * _ALIGNMENT
        if padded > self._free.numel():
            try:
                self._free = zero_bytes(max(padded, _CHUNK))
            except OSError:
                return tensor
        taken, self._free = self._free[:size], self._free[padded:]
        return taken.view(tensor.dtype).view(tensor.shape).copy_(tensor)
