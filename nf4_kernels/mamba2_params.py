"""The tensors of a Mamba2 layer's step, and what the compiled library is told of them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from torch import Tensor

from nf4_kernels.gated_delta_params import Sequences
from nf4_kernels.params import DTYPES

_PARAMETERS = ("conv_weight", "conv_bias", "a_log", "d", "dt_bias", "norm_weight")
_ROWS = ("z", "xbc", "dt")


class Nf4Mamba2(ctypes.Structure):
    """Nf4Mamba2 of csrc/mamba2.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_ROWS, *_PARAMETERS)),
        *((name, ctypes.c_void_p) for name in ("conv_state", "state", "out", "slots", "starts", "has_state")),
        *((name, ctypes.c_int64) for name in ("z_stride", "xbc_stride", "dt_stride", "conv_slot", "state_slot")),
        *((name, ctypes.c_int32) for name in ("sequences", "heads", "head_dim", "state_dim", "groups", "norm_groups")),
        *((name, ctypes.c_int32) for name in ("norm_before_gate", "taps", "dtype")),
        *((name, ctypes.c_float) for name in ("eps", "dt_min", "dt_max")),
    )


@dataclass(frozen=True)
class Mamba2:
    """The tensors of a layer's step; shapes and meaning: nf4_kernels/mamba2.py."""

    z: Tensor
    xbc: Tensor
    dt: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    a_log: Tensor
    d: Tensor
    dt_bias: Tensor
    norm_weight: Tensor | None
    eps: float
    dt_limit: tuple[float, float]
    groups: int
    norm_groups: int
    norm_before_gate: bool
    conv_state: Tensor
    state: Tensor

    @property
    def heads(self) -> int:
        return self.state.shape[1]

    @property
    def state_dim(self) -> int:
        return self.state.shape[2]

    @property
    def head_dim(self) -> int:
        return self.state.shape[3]

    @property
    def width(self) -> int:
        """Columns of z, of x and of the result."""
        return self.heads * self.head_dim


def struct_of(p: Mamba2, sequences: Sequences, out: Tensor) -> Nf4Mamba2:
    """The C interface's view of tensors that nf4_kernels.mamba2 has checked; the caller keeps them alive.

    Parameters, indices, rows and slots of the states are contiguous.
    """
    tensors = {name: getattr(p, name) for name in (*_ROWS, *_PARAMETERS, "conv_state", "state")}
    tensors |= {"slots": sequences.slots, "starts": sequences.query_start_loc, "has_state": sequences.has_state}
    return Nf4Mamba2(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()},
        **{f"{name}_stride": getattr(p, name).stride(0) for name in _ROWS},
        out=out.data_ptr(),
        conv_slot=p.conv_state.stride(0),
        state_slot=p.state.stride(0),
        sequences=len(sequences.slots),
        heads=p.heads,
        head_dim=p.head_dim,
        state_dim=p.state_dim,
        groups=p.groups,
        norm_groups=p.norm_groups,
        norm_before_gate=p.norm_before_gate,
        taps=p.conv_weight.shape[1],
        dtype=DTYPES[p.xbc.dtype],
        eps=p.eps,
        dt_min=p.dt_limit[0],
        dt_max=p.dt_limit[1],
    )
