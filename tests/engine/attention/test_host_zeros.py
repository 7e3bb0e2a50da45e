"""Tensors of zeros in host memory, as the KV cache on CPU has them."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from nf4_kernels.cpu.huge_pages import HUGE_PAGE
from server.engine.runtime.attention.host_zeros import PAGES_THREAD, host_zeros

SHAPES = [(3, 16, 2, 24), (3, 16, 1, 5), (0, 16, 1, 5), (7, 16, 2, 24)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_have_memory_of_their_own(dtype: torch.dtype) -> None:
    tensors = host_zeros(SHAPES, dtype)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == [(shape, dtype) for shape in SHAPES]
    assert all(tensor.is_contiguous() for tensor in tensors)
    for value, tensor in enumerate(tensors, 1):
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
        tensor.fill_(value)
    for value, tensor in enumerate(tensors, 1):
        assert (tensor == value).all()


def test_small_tensors_share_huge_pages() -> None:
    """A small cache takes little more than its bytes, however many layers it is for."""
    tensors = host_zeros([(16, 16, 3, 64)] * 60, torch.float32)
    for thread in threading.enumerate():
        if thread.name == PAGES_THREAD:
            thread.join()
    pages = {tensor.data_ptr() // HUGE_PAGE for tensor in tensors}
    pages |= {(tensor.data_ptr() + tensor.numel() * 4 - 1) // HUGE_PAGE for tensor in tensors}
    assert len(pages) <= math.ceil(sum(tensor.numel() * 4 for tensor in tensors) / HUGE_PAGE) + 1
