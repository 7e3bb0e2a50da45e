"""Parameters that both compiled libraries take: csrc/params.h's dtypes, activations and structs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nf4_kernels.format import Weight

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The dtypes that the kernels compute with, and their numbers in csrc/params.h."""

ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}
"""The activations of a gate, and their numbers there; 0 is none."""

EXPERT_ACTIVATIONS = {**ACTIVATIONS, "swiglu_oai": 3}
"""The activations of experts' gates; swiglu_oai is gpt-oss' clamped one, which changes the ups, too."""


class Nf4Weight(ctypes.Structure):
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
        ("offset_stride", ctypes.c_int32),
        ("group_offset", ctypes.c_int32),
        ("group_skip", ctypes.c_int32),
    )


TABLE_NUMBERS = {"nf4": 0, "fp4": 1}
"""The tables of codes, and their numbers in csrc/params.h, for the upper half of the CPU library's offset_stride."""


def weight_struct(weight: Weight, n: int, k: int, nested: tuple[Tensor, Tensor, Tensor, int] | None) -> Nf4Weight:
    """The C interface's view of a weight in NF4 as n rows of k; nested is its second_level(), None where it is plain.

    The caller has checked the tensors, and keeps them alive while the struct is used.
    """
    packed, absmax = weight.packed.data_ptr(), weight.absmax.data_ptr()
    if nested is None:
        return Nf4Weight(packed=packed, absmax=absmax, n=n, k=k, blocksize=weight.blocksize)
    absmax_8bit, absmax_code, absmax_offset, stride = nested
    return Nf4Weight(
        packed=packed,
        absmax=absmax,
        absmax_8bit=absmax_8bit.data_ptr(),
        absmax_code=absmax_code.data_ptr(),
        absmax_offset=absmax_offset.data_ptr(),
        n=n,
        k=k,
        blocksize=weight.blocksize,
        offset_stride=stride,
        group_offset=weight.group_offset,
        group_skip=weight.group_skip,
    )


def size_error(struct_size: Callable[[bytes], int], structs: Mapping[str, type[ctypes.Structure]]) -> str | None:
    """Why a library cannot be called with these structs, by their C names; None where it can.

    struct_size: the library's own nf4_cpu_struct_size or nf4_cuda_struct_size. The sizes differ where the library was built
    from other sources than this Python belongs to.
    """
    for name, struct in structs.items():
        compiled, here = struct_size(name.encode()), ctypes.sizeof(struct)
        if compiled != here:
            return (
                f"{name} has {compiled} bytes in the library and {here} in Python; "
                "build it again with `python -m nf4_kernels.build`"
            )
    return None
