"""Mamba2 on the CPU kernels: one call convolves, advances the states and normalises."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from nf4_kernels import cpu
from nf4_kernels.gated_delta_params import Sequences
from nf4_kernels.mamba2_params import Mamba2, struct_of


def takes(p: Mamba2) -> bool:
    """Whether the kernels compute on p's device."""
    return p.xbc.is_cpu and cpu.load_error() is None


def run(p: Mamba2, sequences: Sequences, out: Tensor) -> None:
    """Write the results to out [T, H P]; rows of no sequence are left alone. KernelError without a library."""
    rows = {name: getattr(p, name) for name in ("z", "xbc", "dt")}
    p = replace(p, **{name: x if x.stride(1) == 1 else x.contiguous() for name, x in rows.items()})
    struct = struct_of(p, sequences, out)
    if len(sequences.slots) and cpu.usable().nf4_cpu_mamba2(ctypes.byref(struct), torch.get_num_threads()):
        raise cpu.KernelError(f"nf4_cpu_mamba2 refused {list(p.xbc.shape)}")
