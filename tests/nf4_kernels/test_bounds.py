"""The CPU kernels touch nothing beside their buffers: each one here lies against pages that fault when touched."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch

from nf4_kernels import cpu, reference
from nf4_kernels.params import DTYPES, Nf4Weight
from tests.nf4_kernels.weights import float32_bound, quantized, using_isa

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Guarded:
    """Copies of tensors, each ending where an untouchable page begins."""

    def __init__(self) -> None:
        self._maps: list[tuple[mmap.mmap, int, int]] = []

    def room(self, size: int) -> int:
        """Address of size bytes."""
        body = -(-size // PAGE) * PAGE
        area = mmap.mmap(-1, body + 2 * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        for fence in (start, start + PAGE + body):
            assert _libc.mprotect(fence, PAGE, 0) == 0
        self._maps.append((area, start, body))
        return start + PAGE + body - size

    def copy(self, tensor: torch.Tensor | None) -> int | None:
        """Address of the tensor's elements."""
        if tensor is None:
            return None
        address = self.room(tensor.numel() * tensor.element_size())
        ctypes.memmove(address, tensor.contiguous().data_ptr(), tensor.numel() * tensor.element_size())
        return address

    def release(self) -> None:
        """Forget everything, with the fences taken down."""
        for _, start, body in self._maps:
            assert _libc.mprotect(start, body + 2 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        self._maps.clear()


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    areas = Guarded()
    yield areas
    areas.release()


@pytest.fixture(params=cpu.ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every instruction set that this CPU has, in turn."""
    with using_isa(request.param):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 64), (33, 64), (31, 576), (100, 320), (7, 100), (5, 65)])
def test_linear_and_dequantize_stay_inside(guarded: Guarded, n: int, k: int, dtype: torch.dtype) -> None:
    library, number = cpu.usable(), DTYPES[dtype]
    width = dtype.itemsize
    for blocksize, nested in ((64, True), (64, False), (32, True), (128, True)):
        q = quantized((n, k), blocksize, nested, seed=n)
        tensors = (q.packed, q.weight.absmax, *q.nested)
        weight = Nf4Weight(*(guarded.copy(t) for t in tensors), n, k, blocksize)
        out = guarded.room(n * k * width)
        assert library.nf4_cpu_dequantize(ctypes.byref(weight), out, number, 2) == 0
        part, row = guarded.room((n + 1) // 2 * k * width), n // 2
        assert library.nf4_cpu_dequantize_rows(ctypes.byref(weight), row, n - row, part, number, 2) == 0
        assert ctypes.string_at(part, (n - row) * k * width) == ctypes.string_at(
            out + row * k * width, (n - row) * k * width
        )
        for rows in (1, 3, 8, 9, 17, 70):
            x, bias = torch.randn(rows, k).to(dtype), torch.randn(n).to(dtype)
            out, got = guarded.room(rows * n * width), torch.empty(rows, n, dtype=dtype)
            pointers = (ctypes.byref(weight), guarded.copy(bias), guarded.copy(x), out)
            assert library.nf4_cpu_linear_at(*pointers, rows, number, 2) == 0
            ctypes.memmove(got.data_ptr(), out, rows * n * width)
            exact = reference.linear(x.float(), q.weight, bias.float())
            error = float((got.float() - exact).norm() / exact.norm())
            expanded = reference.dequantize(q.weight, torch.float32)
            close = 1e-5 + float32_bound(x.float(), expanded, exact)
            assert error < (close if dtype is torch.float32 else 2e-2), (blocksize, rows)
    guarded.release()


@pytest.mark.parametrize(("n", "k"), [(1, 32), (70, 576), (64, 100), (33, 64), (5, 1)])
def test_linear_with_bfloat16_weights_stays_inside(guarded: Guarded, n: int, k: int) -> None:
    for rows in (1, 3, 8, 9, 17, 40):
        weight, out = torch.randn(n, k).to(torch.bfloat16), guarded.room(rows * n * 4)
        pointers = [guarded.copy(t) for t in (torch.randn(rows, k), weight, torch.randn(n))]
        assert cpu.usable().nf4_cpu_linear_bf16w(*pointers, out, rows, n, k, 2) == 0
