"""The CPU kernels: loads libnf4_cpu.so and calls it with tensors' pointers.

Source: csrc/cpu/*.cpp behind the C interface of csrc/cpu/cpu.h. The library chooses its instruction set when it loads (AMX,
AVX-512 with VNNI, AVX2 or portable); NF4_CPU_ISA forces one of them. load_error() says why the kernels
cannot be used.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import time

import torch
from torch import Tensor

from nf4_kernels.format import Weight, check, second_level
from nf4_kernels.gated_delta_params import Nf4GatedDelta
from nf4_kernels.library_files import cpu_library
from nf4_kernels.mamba2_params import Nf4Mamba2
from nf4_kernels.params import DTYPES, TABLE_NUMBERS, Nf4Weight, size_error, weight_struct

ISAS = ("amx", "avx512vnni", "avx2", "portable")
"""The instruction sets that there are kernels for, the best first."""


DEQUANTIZED_FROM = 16
"""Tokens from which on the portable path dequantizes weights for torch's GEMM, which has instruction sets of its own."""
_DEQUANTIZED_ELEMENTS = 1 << 20
"""Of a weight at a time: they stay in the caches, and in one piece of memory."""


class KernelError(RuntimeError):
    """The library is missing, or refused its arguments."""


@functools.cache
def library() -> ctypes.CDLL | str:
    """The loaded library, compiled if there was none (library_files.py), or why it could not be loaded."""
    path = cpu_library()
    if isinstance(path, str):
        return path
    try:
        loaded = ctypes.CDLL(str(path))
        integer, pointer = ctypes.c_int64, ctypes.c_void_p
        loaded.nf4_cpu_dequantize.argtypes = (ctypes.POINTER(Nf4Weight), pointer, ctypes.c_int32, ctypes.c_int32)
        loaded.nf4_cpu_dequantize_rows.argtypes = (pointer, integer, integer, pointer, ctypes.c_int32, ctypes.c_int32)
        loaded.nf4_cpu_count_linear.argtypes = (ctypes.c_double,)
        loaded.nf4_cpu_count_linear.restype = None
        loaded.nf4_cpu_linear_at.argtypes = (*[pointer] * 4, integer, ctypes.c_int32, ctypes.c_int32)
        loaded.nf4_cpu_moe.argtypes = (*[pointer] * 6, *[integer] * 3, *[ctypes.c_int32] * 4)
        loaded.nf4_cpu_linear_bf16w.argtypes = (*[pointer] * 4, *[integer] * 3, ctypes.c_int32)
        loaded.nf4_cpu_gated_delta.argtypes = (ctypes.POINTER(Nf4GatedDelta), ctypes.c_int32)
        loaded.nf4_cpu_mamba2.argtypes = (ctypes.POINTER(Nf4Mamba2), ctypes.c_int32)
        loaded.nf4_cpu_struct_size.restype = integer
        loaded.nf4_cpu_struct_size.argtypes = (ctypes.c_char_p,)
        loaded.nf4_cpu_isa.restype = ctypes.c_char_p
        loaded.nf4_cpu_set_isa.argtypes = (ctypes.c_char_p,)
        loaded.nf4_cpu_sleep_at_barriers.restype = None
        loaded.nf4_cpu_sleep_at_barriers.argtypes = (ctypes.c_int32,)
        loaded.nf4_cpu_clock.argtypes = (ctypes.POINTER(ctypes.c_double), ctypes.POINTER(ctypes.c_double))
    except (OSError, AttributeError) as e:
        return f"{path} cannot be loaded: {e}"
    structs = {"Nf4Weight": Nf4Weight, "Nf4GatedDelta": Nf4GatedDelta, "Nf4Mamba2": Nf4Mamba2}
    if error := size_error(loaded.nf4_cpu_struct_size, structs):
        return f"{path} cannot be used: {error}"
    wanted = os.environ.get("NF4_CPU_ISA")
    if wanted and loaded.nf4_cpu_set_isa(wanted.encode()):
        return f"NF4_CPU_ISA={wanted}: not an instruction set of this CPU ({', '.join(ISAS)})"
    return loaded


def load_error() -> str | None:
    """None where the CPU kernels can be used; else why not."""
    loaded = library()
    return loaded if isinstance(loaded, str) else None


def isa() -> str:
    """The instruction set in use: portable, avx2, avx512vnni or amx. KernelError where the library is missing."""
    name: bytes = usable().nf4_cpu_isa()
    return name.decode()


def set_isa(name: str) -> None:
    """Use another instruction set from now on. ValueError where this CPU does not have it."""
    if usable().nf4_cpu_set_isa(name.encode()):
        raise ValueError(f"{name!r} is not an instruction set of this CPU ({', '.join(ISAS)})")


def sleep_at_barriers(sleeps: bool) -> None:
    """Have this process' OpenMP threads sleep at barriers soon, or first spin as GOMP_SPINCOUNT says (the default).

    Sleeping is several times faster if other work takes the cores, and slower if none does. KernelError without a library.
    """
    usable().nf4_cpu_sleep_at_barriers(sleeps)


def clock() -> tuple[float, float]:
    """(seconds in dequantization, seconds in linear layers) since the library was loaded; see nf4_kernels.timing."""
    loaded = library()
    if isinstance(loaded, str):
        return 0.0, 0.0
    dequant, linear_ = ctypes.c_double(), ctypes.c_double()
    loaded.nf4_cpu_clock(dequant, linear_)
    return dequant.value, linear_.value


class PreparedLinear:
    """A linear layer whose arguments have been checked and laid out once, for the cheapest possible calls.

    Keeps the tensors alive. Any number of threads may call it at once.
    """

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        self.n, self.k = weight.matrix
        if bias is not None and (bias.dtype not in DTYPES or bias.numel() != self.n):
            raise ValueError(
                f"bias must be float32, bfloat16 or float16 with {self.n} elements, got {bias.dtype} with {bias.numel()}"
            )
        self._keep = weight.contiguous()
        self._struct = struct_of(self._keep, self.n, self.k)
        self._weight = ctypes.byref(self._struct)
        self.bias = None if bias is None else bias.contiguous()
        self._bias_pointer = None if self.bias is None else self.bias.data_ptr()
        self._run = usable().nf4_cpu_linear_at

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] of float32, bfloat16 or float16 to [..., N]."""
        dtype, shape = DTYPES.get(x.dtype), x.shape
        if dtype is None or shape[-1] != self.k or not x.is_cpu:
            raise ValueError(
                f"x must end in {self.k} and be float32, bfloat16 or float16 on the CPU,"
                f" got {list(shape)} {x.dtype} on {x.device}"
            )
        if self.bias is not None and self.bias.dtype is not x.dtype:
            raise ValueError(f"bias must be {x.dtype}, got {self.bias.dtype}")
        if not x.is_contiguous():
            x = x.contiguous()
        out = x.new_empty((*shape[:-1], self.n))
        m = x.numel() // self.k
        if m >= DEQUANTIZED_FROM and isa() == "portable":
            self._multiply_dequantized(x.view(m, self.k), out.view(m, self.n))
        elif m and self._run(
            self._weight, self._bias_pointer, x.data_ptr(), out.data_ptr(), m, dtype, torch.get_num_threads()
        ):
            raise KernelError(f"nf4_cpu_linear_at refused M={m}, N={self.n}, K={self.k}")
        return out

    def _multiply_dequantized(self, x: Tensor, out: Tensor) -> None:
        """Write the GEMM of x [m, K] to out [m, N] through rows in float32 and torch's GEMM."""
        began = time.perf_counter()
        library, threads = usable(), torch.get_num_threads()
        # Detached: torch writes to a given tensor only where it has no gradients to follow.
        wide, bias = x.detach().float(), None if self.bias is None else self.bias.detach().float()
        rows = _dequantized_rows(self.n, self.k)
        weight = torch.empty(rows, self.k)
        for row in range(0, self.n, rows):
            count = min(rows, self.n - row)
            if library.nf4_cpu_dequantize_rows(self._weight, row, count, weight.data_ptr(), 0, threads):
                raise KernelError(f"nf4_cpu_dequantize_rows refused rows {row} to {row + count} of {self.n}")
            columns, factor = out[:, row : row + count], weight[:count].t()
            into = columns if out.dtype is torch.float32 else wide.new_empty(columns.shape)
            if bias is None:
                torch.mm(wide, factor, out=into)
            else:
                torch.addmm(bias[row : row + count], wide, factor, out=into)
            if into is not columns:
                columns.copy_(into)
        library.nf4_cpu_count_linear(time.perf_counter() - began)

    def call_of(self, x: Tensor, out: Tensor) -> tuple[int, tuple[int, ...]]:
        """The address of the C function that a call with x makes, and its arguments, each a pointer or an integer.

        x [..., K] and out [..., N] are contiguous, of one dtype, and stay where they are, as this object does. The call
        has the threads that OpenMP has in the thread that makes it (0), as torch.set_num_threads() sets them.
        """
        if x.dtype not in DTYPES or not (
            x.is_cpu and x.is_contiguous() and out.is_contiguous() and x.dtype is out.dtype
        ):
            raise ValueError(f"x and out must be contiguous and of one dtype, got {x.dtype} and {out.dtype}")
        if x.shape[-1] != self.k or out.shape != (*x.shape[:-1], self.n):
            raise ValueError(f"x must end in {self.k}, out in {self.n}, got {list(x.shape)} and {list(out.shape)}")
        function = ctypes.cast(self._run, ctypes.c_void_p).value
        assert function is not None
        pointers = (ctypes.addressof(self._struct), self._bias_pointer or 0, x.data_ptr(), out.data_ptr())
        return function, (*pointers, x.numel() // self.k, DTYPES[x.dtype], 0)


def _dequantized_rows(n: int, k: int) -> int:
    """Rows of a weight [n, k] to dequantize at a time: pieces of about one size, since torch is slower at odd widths."""
    pieces = -(-n * k // _DEQUANTIZED_ELEMENTS)
    return min(n, -(-n // (16 * pieces)) * 16)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times the transposed weight plus bias: [..., N] in x's dtype, accumulated in float32."""
    return PreparedLinear(weight, bias)(x)


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight in dtype (float32, bfloat16, float16), bit for bit as bitsandbytes gives it."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    keep = weight.contiguous()
    count = math.prod(keep.shape)
    struct = struct_of(keep, *(keep.matrix if keep.group_skip else (1, count)))
    out = torch.empty([int(size) for size in keep.shape], dtype=dtype)
    if count and usable().nf4_cpu_dequantize(
        ctypes.byref(struct), out.data_ptr(), DTYPES[dtype], torch.get_num_threads()
    ):
        raise KernelError(f"nf4_cpu_dequantize refused {count} elements in blocks of {keep.blocksize}")
    return out


def linear_bf16w(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float32 x [..., K] times a bfloat16 weight [N, K] transposed: [..., N] in float32, accumulated in float32."""
    n, k = weight.shape
    if x.dtype != torch.float32 or x.shape[-1] != k:
        raise ValueError(f"x must be float32 and end in {k}, got {list(x.shape)} {x.dtype}")
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous bfloat16, got {weight.dtype}")
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], n), dtype=torch.float32)
    bias_pointer = None if bias is None else bias.data_ptr()
    pointers = (x.data_ptr(), weight.data_ptr(), bias_pointer, out.data_ptr())
    m = x.numel() // k
    if m and usable().nf4_cpu_linear_bf16w(*pointers, m, n, k, torch.get_num_threads()):
        raise KernelError(f"nf4_cpu_linear_bf16w refused M={m}, N={n}, K={k}")
    return out


def struct_of(weight: Weight, n: int, k: int) -> Nf4Weight:
    """The C interface's view of a contiguous weight's tensors, as n rows of k. ValueError where they do not fit."""
    check(weight)
    if weight.absmax_8bit is None:
        return _with_table(weight_struct(weight, n, k, None), weight)
    nested = second_level(weight)
    absmax_8bit, absmax_code, absmax_offset, _ = nested
    if absmax_code.dtype != torch.float32 or absmax_code.numel() != 256:
        raise ValueError(f"absmax_code must be float32 with 256 elements, got {absmax_code.dtype}")
    if not (
        weight.packed.is_cpu
        and weight.absmax.is_cpu
        and absmax_8bit.is_cpu
        and absmax_code.is_cpu
        and absmax_offset.is_cpu
    ):
        raise ValueError("the weight's tensors must all be on the CPU")
    return _with_table(weight_struct(weight, n, k, nested), weight)


def _with_table(struct: Nf4Weight, weight: Weight) -> Nf4Weight:
    struct.offset_stride |= TABLE_NUMBERS[weight.table] << 16
    return struct


def usable() -> ctypes.CDLL:
    loaded = library()
    if isinstance(loaded, str):
        raise KernelError(loaded)
    return loaded
