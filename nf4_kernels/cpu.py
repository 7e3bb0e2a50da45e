"""The CPU kernels: loads libnf4_cpu.so and calls it with tensors' pointers.

Source: csrc/cpu/*.cpp behind the C interface of csrc/cpu/cpu.h. The library chooses its instruction set when it loads (AMX,
AVX-512, AVX2 or portable); NF4_CPU_ISA forces one. load_error() says why the kernels cannot be used.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nf4_kernels.format import check

LIBRARY = Path(__file__).resolve().parent / "lib" / "libnf4_cpu.so"
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Weight(ctypes.Structure):
    """Nf4Weight of csrc/params.h."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("absmax", ctypes.c_void_p),
        ("absmax_8bit", ctypes.c_void_p),
        ("absmax_code", ctypes.c_void_p),
        ("absmax_offset", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("blocksize", ctypes.c_int32),
    )


class _Linear(ctypes.Structure):
    """Nf4Linear of csrc/params.h; workspace, counters and stream are for the GPU."""

    _fields_ = (
        ("weight", _Weight),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    )


class KernelError(RuntimeError):
    """The library is missing, or refused its arguments."""


@functools.cache
def library() -> ctypes.CDLL | str:
    """The loaded library, or why it could not be loaded."""
    if not LIBRARY.exists():
        return f"{LIBRARY} does not exist; build it with `python -m nf4_kernels.build`"
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        integer, pointer = ctypes.c_int64, ctypes.c_void_p
        loaded.nf4_cpu_dequantize.argtypes = (ctypes.POINTER(_Weight), pointer, ctypes.c_int32, ctypes.c_int32)
        loaded.nf4_cpu_linear.argtypes = (ctypes.POINTER(_Linear), ctypes.c_int32)
        loaded.nf4_cpu_linear_bf16w.argtypes = (*[pointer] * 4, *[integer] * 3, ctypes.c_int32)
        loaded.nf4_cpu_isa.restype = ctypes.c_char_p
        loaded.nf4_cpu_set_isa.argtypes = (ctypes.c_char_p,)
        loaded.nf4_cpu_clock.argtypes = (ctypes.POINTER(ctypes.c_double), ctypes.POINTER(ctypes.c_double))
    except (OSError, AttributeError) as e:
        return f"{LIBRARY} cannot be loaded: {e}"
    wanted = os.environ.get("NF4_CPU_ISA")
    if wanted and loaded.nf4_cpu_set_isa(wanted.encode()):
        return f"NF4_CPU_ISA={wanted}: not an instruction set of this CPU (portable, avx2, avx512, amx)"
    return loaded


def load_error() -> str | None:
    """None where the CPU kernels can be used; else why not."""
    loaded = library()
    return loaded if isinstance(loaded, str) else None


def isa() -> str:
    """The instruction set in use: portable, avx2, avx512 or amx. KernelError where the library is missing."""
    name: bytes = _usable().nf4_cpu_isa()
    return name.decode()


def set_isa(name: str) -> None:
    """Use another instruction set from now on. ValueError where this CPU does not have it."""
    if _usable().nf4_cpu_set_isa(name.encode()):
        raise ValueError(f"{name!r} is not an instruction set of this CPU (portable, avx2, avx512, amx)")


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

    Keeps the tensors alive. Not for concurrent calls from several threads.
    """

    def __init__(
        self,
        packed: Tensor,
        shape: Sequence[int],
        absmax: Tensor,
        blocksize: int,
        bias: Tensor | None = None,
        absmax_8bit: Tensor | None = None,
        absmax_code: Tensor | None = None,
        absmax_offset: Tensor | None = None,
    ) -> None:
        if len(shape) != 2:
            raise ValueError(f"shape must be [N, K], got {list(shape)}")
        self._keep = (packed, absmax, bias, absmax_8bit, absmax_code, absmax_offset)
        self.n, self.k = int(shape[0]), int(shape[1])
        self._bias = bias
        self._call = _Linear()
        self._call.weight = _weight(
            packed, self.n, self.k, absmax, blocksize, absmax_8bit, absmax_code, absmax_offset
        )  # fmt: skip
        self._call.bias = None if bias is None else bias.data_ptr()
        self._reference = ctypes.byref(self._call)
        self._run = _usable().nf4_cpu_linear

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] of float32, bfloat16 or float16 to [..., N]."""
        if x.shape[-1] != self.k or x.dtype not in _DTYPES:
            raise ValueError(
                f"x must end in {self.k} and be float32, bfloat16 or float16, got {list(x.shape)} {x.dtype}"
            )
        if self._bias is not None and self._bias.dtype != x.dtype:
            raise ValueError(f"bias must be {x.dtype}, got {self._bias.dtype}")
        if not x.is_contiguous():
            x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.n), dtype=x.dtype)
        call = self._call
        call.x, call.out = x.data_ptr(), out.data_ptr()
        call.m, call.dtype = x.numel() // self.k, _DTYPES[x.dtype]
        if call.m and self.n and self._run(self._reference, torch.get_num_threads()):
            raise KernelError(f"nf4_cpu_linear refused M={call.m}, N={self.n}, K={self.k}")
        return out


def linear(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """x [..., K] times the transposed weight plus bias: [..., N] in x's dtype, accumulated in float32."""
    bias = None if bias is None else bias.contiguous()
    return PreparedLinear(packed, shape, absmax, blocksize, bias, absmax_8bit, absmax_code, absmax_offset)(x)


def dequantize(
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    dtype: torch.dtype,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """The weight in dtype (float32, bfloat16, float16), bit for bit as bitsandbytes gives it."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
    count = check(packed, shape, absmax, blocksize, absmax_8bit)
    keep = tuple(None if t is None else t.contiguous() for t in (packed, absmax, absmax_8bit, absmax_code))
    weight = _weight(keep[0], 1, count, keep[1], blocksize, keep[2], keep[3], absmax_offset)  # type: ignore[arg-type]
    out = torch.empty([int(size) for size in shape], dtype=dtype)
    if count and _usable().nf4_cpu_dequantize(weight, out.data_ptr(), _DTYPES[dtype], torch.get_num_threads()):
        raise KernelError(f"nf4_cpu_dequantize refused {count} elements in blocks of {blocksize}")
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
    if m and _usable().nf4_cpu_linear_bf16w(*pointers, m, n, k, torch.get_num_threads()):
        raise KernelError(f"nf4_cpu_linear_bf16w refused M={m}, N={n}, K={k}")
    return out


def _weight(
    packed: Tensor,
    n: int,
    k: int,
    absmax: Tensor,
    blocksize: int,
    absmax_8bit: Tensor | None,
    absmax_code: Tensor | None,
    absmax_offset: Tensor | None,
) -> _Weight:
    check(packed, (n, k), absmax, blocksize, absmax_8bit)
    if absmax_8bit is None:
        return _Weight(packed.data_ptr(), absmax.data_ptr(), None, None, None, n, k, blocksize)
    if absmax_code is None or absmax_offset is None:
        raise ValueError("absmax_8bit needs absmax_code and absmax_offset beside it")
    pointers = (t.data_ptr() for t in (packed, absmax, absmax_8bit, absmax_code, absmax_offset))
    return _Weight(*pointers, n, k, blocksize)


def _usable() -> ctypes.CDLL:
    loaded = library()
    if isinstance(loaded, str):
        raise KernelError(loaded)
    return loaded
