"""Norms, rotary embedding and gated activation on CPU: C++ in float32, called at once or in a list of calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from server.engine.runtime.native import load_native

SOURCE = Path(__file__).with_name("pointwise.cpp")
ACTIVATIONS = ("silu", "gelu_tanh")
_ARGUMENTS = 7
_Fields = tuple[tuple[str, Any], ...]


def _fields(pointers: str, integers: str, floats: str = "") -> _Fields:
    kinds = ((pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (floats, ctypes.c_float))
    return tuple((name, kind) for names, kind in kinds for name in names.split())


class _Norm(ctypes.Structure):
    _fields_ = _fields("x addend weight residual out", "tokens width x_pitch threads", "eps offset")


class _Rotation(ctypes.Structure):
    _fields_ = _fields("heads norm cos sin", "tokens count dim columns token_pitch head_pitch threads", "eps offset")


class _Gate(ctypes.Structure):
    _fields_ = _fields("gate_up out", "tokens columns threads activation")


class _Angles(ctypes.Structure):
    _fields_ = _fields("positions frequencies cos sin", "tokens half", "scaling")


class _CCall(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_int64 * _ARGUMENTS))


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled source; None where it cannot be compiled, and torch's operations compute the same."""
    library = load_native(SOURCE)
    if isinstance(library, str):
        return None
    library.pointwise_run.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.pointwise_run.restype = None
    return library


def computes(*tensors: torch.Tensor) -> bool:
    """Whether the functions here take these tensors: float32 on CPU, with a contiguous last dimension."""
    dense = all(tensor.is_cpu and tensor.dtype is torch.float32 and tensor.stride(-1) == 1 for tensor in tensors)
    return dense and _library() is not None


@dataclass(frozen=True)
class Call:
    """A call of a C function: its address, its arguments, and what the pointers among them belong to."""

    function: int
    arguments: tuple[int, ...]
    kept: tuple[object, ...]

    def make(self) -> None:
        """Make the call."""
        Calls([self]).make()


class Calls:
    """Calls that are made one after another, as one call of a C function. Their tensors stay where they are."""

    def __init__(self, calls: Sequence[Call]) -> None:
        structs = (_CCall(call.function, (ctypes.c_int64 * _ARGUMENTS)(*call.arguments)) for call in calls)
        self._array = (_CCall * len(calls))(*structs)
        self._kept = [call.kept for call in calls]
        library = _library()
        assert library is not None
        self._run = library.pointwise_run

    def make(self) -> None:
        """Make the calls."""
        self._run(self._array, len(self._array))


def _call(name: str, struct: ctypes.Structure, *kept: object) -> Call:
    function = ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value
    assert function is not None
    return Call(function, (ctypes.addressof(struct),), (struct, *kept))


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
) -> Call:
    """out = residual + x / sqrt(mean(x^2) + eps) * (weight + offset); with an addend x += addend first.

    x [T, width], rows dense; the others [T, width] contiguous, weight [width]. out may be the residual.
    """
    (tokens, width), threads = x.shape, torch.get_num_threads()
    pointers = (x.data_ptr(), _pointer(addend), weight.data_ptr(), _pointer(residual), out.data_ptr())
    struct = _Norm(*pointers, tokens, width, x.stride(0), threads, eps, offset)
    return _call("pointwise_norm", struct, x, addend, weight, residual, out)


def rotate(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> Call:
    """Norm, if there is a weight [dim], and rotary embedding of heads [T, count, dim], in place.

    cos and sin [T, columns], contiguous; the columns of a head beyond these are not rotated.
    """
    tokens, count, dim = heads.shape
    numbers = (tokens, count, dim, cos.shape[-1], heads.stride(0), heads.stride(1), torch.get_num_threads())
    struct = _Rotation(heads.data_ptr(), _pointer(weight), cos.data_ptr(), sin.data_ptr(), *numbers, eps, offset)
    return _call("pointwise_rotate", struct, heads, weight, cos, sin)


def gate(gate_up: torch.Tensor, activation: str, out: torch.Tensor) -> Call:
    """out [T, f] = activation(gate) * up, of gate_up [T, 2 f], both contiguous; activation: one of ACTIVATIONS."""
    numbers = (out.shape[0], out.shape[1], torch.get_num_threads(), ACTIVATIONS.index(activation))
    return _call("pointwise_gate", _Gate(gate_up.data_ptr(), out.data_ptr(), *numbers), gate_up, out)


def angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, cos: torch.Tensor, sin: torch.Tensor
) -> Call:
    """cos and sin [T, 2 half] of positions int64 [T] times frequencies [half], multiplied by scaling."""
    pointers = (positions.data_ptr(), frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr())
    struct = _Angles(*pointers, positions.shape[0], frequencies.shape[0], scaling)
    return _call("pointwise_angles", struct, positions, frequencies, cos, sin)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
