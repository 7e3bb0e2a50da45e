"""What both compiled libraries are told in the same way: csrc/params.h's dtypes, activations and Nf4Weight."""

from __future__ import annotations

import ctypes

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""What the kernels compute with, and its number in csrc/params.h."""

ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}
"""What is made of a gate, and its number there; 0 is none."""


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
