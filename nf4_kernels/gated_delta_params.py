"""The tensors of a layer of the gated delta rule, and what the compiled libraries are told of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nf4_kernels.params import DTYPES


class Nf4GatedDelta(ctypes.Structure):
    """Nf4GatedDelta of csrc/gated_delta.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "z", "a", "b", "conv_weight", "a_log", "dt_bias", "norm_weight")),
        *((name, ctypes.c_void_p) for name in ("conv_state", "state", "out", "slots", "starts", "has_state")),
        *((name, ctypes.c_void_p) for name in ("counters", "stream")),
        *((name, ctypes.c_int64) for name in ("qkv_stride", "z_stride", "a_stride", "b_stride")),
        *((name, ctypes.c_int64) for name in ("conv_slot", "state_slot")),
        *((name, ctypes.c_int32) for name in ("sequences", "key_heads", "value_heads", "key_dim", "value_dim", "taps")),
        *((name, ctypes.c_int32) for name in ("dtype", "conv_dtype", "norm_dtype", "state_dtype")),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True)
class GatedDelta:
    """The tensors of a layer's step; shapes and meaning: nf4_kernels/gated_delta.py."""

    qkv: Tensor
    z: Tensor
    a: Tensor
    b: Tensor
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    eps: float
    conv_state: Tensor
    state: Tensor
    num_key_heads: int

    @property
    def num_value_heads(self) -> int:
        return self.state.shape[1]

    @property
    def key_dim(self) -> int:
        return self.state.shape[2]

    @property
    def value_dim(self) -> int:
        return self.state.shape[3]

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads


@dataclass(frozen=True)
class Sequences:
    """The sequences of a step: their slots, and for chunks their rows and whether their slots hold states."""

    slots: Tensor
    query_start_loc: Tensor | None = None
    has_state: Tensor | None = None


Expected = tuple[str, tuple[int, ...], tuple[torch.dtype, ...]]
"""A tensor's name, shape and permitted dtypes."""


def check_tensors(p: object, expected: Iterable[Expected]) -> None:
    """Raise ValueError by name for p's tensors that differ, and for pools whose slots are not contiguous. None fits."""
    for name, shape, allowed in expected:
        tensor: Tensor | None = getattr(p, name)
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype not in allowed):
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name} must be {' or '.join(map(str, allowed))} {list(shape)}, got {found}")
    for name in ("conv_state", "state"):
        pool: Tensor = getattr(p, name)
        if pool.shape[0] and not pool[0].is_contiguous():
            raise ValueError(f"a slot of {name} must be contiguous, got strides {list(pool.stride())}")


def check_sequences(sequences: Sequences, tokens: int) -> None:
    """Raise ValueError by name for indices of other shapes or dtypes, and for those that are not contiguous."""
    starts, has_state, count = sequences.query_start_loc, sequences.has_state, len(sequences.slots)
    expected = [("slots", sequences.slots, torch.int32, tokens if starts is None else count)]
    if starts is not None and has_state is not None:
        expected += [("query_start_loc", starts, torch.int32, count + 1), ("has_state", has_state, torch.bool, count)]
    for name, tensor, dtype, size in expected:
        if tensor.dtype is not dtype or tuple(tensor.shape) != (size,) or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype} [{size}], got {tensor.dtype} {list(tensor.shape)}")


def struct_of(p: GatedDelta, sequences: Sequences, out: Tensor) -> Nf4GatedDelta:
    """The C interface's view of tensors that nf4_kernels.gated_delta has checked; the caller keeps them alive.

    Parameters and indices are contiguous, rows of qkv and z and slots of the states, too.
    """
    starts, has_state = sequences.query_start_loc, sequences.has_state
    return Nf4GatedDelta(
        **{name: getattr(p, name).data_ptr() for name in ("qkv", "z", "a", "b", "conv_weight", "a_log", "dt_bias")},
        **{name: getattr(p, name).data_ptr() for name in ("norm_weight", "conv_state", "state")},
        **{f"{name}_stride": getattr(p, name).stride(0) for name in ("qkv", "z", "a", "b")},
        out=out.data_ptr(),
        slots=sequences.slots.data_ptr(),
        starts=None if starts is None else starts.data_ptr(),
        has_state=None if has_state is None else has_state.data_ptr(),
        conv_slot=p.conv_state.stride(0),
        state_slot=p.state.stride(0),
        sequences=len(sequences.slots),
        key_heads=p.num_key_heads,
        value_heads=p.num_value_heads,
        key_dim=p.key_dim,
        value_dim=p.value_dim,
        taps=p.conv_weight.shape[1],
        dtype=DTYPES[p.qkv.dtype],
        conv_dtype=DTYPES[p.conv_weight.dtype],
        norm_dtype=DTYPES[p.norm_weight.dtype],
        state_dtype=DTYPES[p.state.dtype],
        eps=p.eps,
    )
