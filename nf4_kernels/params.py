"""What both compiled libraries are told in the same way: csrc/params.h's dtypes, activations and structs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""What the kernels compute with, and its number in csrc/params.h."""

ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}
"""What a gate goes through, and its number there; 0 is none."""

EXPERT_ACTIVATIONS = {**ACTIVATIONS, "swiglu_oai": 3}
"""What an expert's gates go through; swiglu_oai is gpt-oss' clamped one, which changes the ups, too."""


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
