"""Host memory in huge pages (nf4_kernels/cpu/huge_pages.py)."""

import re
from pathlib import Path

import pytest
import torch

from nf4_kernels.cpu.huge_pages import HUGE_PAGE, HugePages, zero_bytes


def _described(address: int) -> dict[str, str]:
    """Description by the system of the mapping that an address lies in, by the names that it has for it."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if found:
                break
            inside = int(mapping[1], 16) <= address < int(mapping[2], 16)
        elif inside:
            name, _, value = line.partition(":")
            found[name] = value.strip()
    return found


def test_copies_are_equal_aligned_and_beside_each_other() -> None:
    pages = HugePages()
    tensors = [torch.randn(3, 5), torch.arange(100, dtype=torch.uint8), torch.randn(7, 2).T, torch.zeros(0)]
    copies = [pages.copy(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)
        assert copy.dtype is tensor.dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0 or not copy.numel()
    assert 0 < copies[1].data_ptr() - copies[0].data_ptr() <= 64


def test_copies_outlive_their_pages_object() -> None:
    copy = HugePages().copy(torch.arange(1 << 20))
    assert torch.equal(copy, torch.arange(1 << 20))


def test_small_tensors_share_huge_pages() -> None:
    """A small KV cache takes little more than its bytes, however many layers it is for."""
    pages = HugePages()
    tensors = [pages.zeros((16, 16, 3, 64), torch.float32) for _ in range(60)]
    for value, tensor in enumerate(tensors, 1):
        assert not tensor.any()
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors, 1))
    ends = [tensor.data_ptr() + offset for tensor in tensors for offset in (0, tensor.nbytes - 1)]
    assert len({end // HUGE_PAGE for end in ends}) <= sum(tensor.nbytes for tensor in tensors) // HUGE_PAGE + 2


def test_zeros() -> None:
    for size in (0, 1, 4096, HUGE_PAGE + 1):
        zeros = zero_bytes(size)
        assert zeros.shape == (size,)
        assert not zeros.any()
        assert torch.equal(zeros.fill_(3), torch.full((size,), 3, dtype=torch.uint8))


def test_pages_may_be_huge_where_the_system_has_them() -> None:
    """Whether they are depends on how much free memory lies in one piece."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system has no transparent huge pages")
    zeros = zero_bytes(8 * HUGE_PAGE)
    described = _described(zeros.data_ptr())
    assert "hg" in described["VmFlags"].split()
    assert described["THPeligible"] == "1"
