"""The gated delta rule on the CPU kernels: one call convolves, advances the states and normalises."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from nf4_kernels import cpu
from nf4_kernels.gated_delta_params import GatedDelta, Sequences, struct_of


def takes(p: GatedDelta) -> bool:
    """Whether the kernels compute on p's device."""
    return p.qkv.is_cpu and cpu.load_error() is None


def run(p: GatedDelta, sequences: Sequences, out: Tensor) -> None:
    """Write the results to out [T, Hv dv]; rows of no sequence are left alone. KernelError without a library."""
    rows = {name: getattr(p, name) for name in ("qkv", "z", "a", "b")}
    p = replace(
        p,
        **{name: x if x.stride(1) == 1 else x.contiguous() for name, x in rows.items()},
        conv_weight=p.conv_weight.contiguous(),
        norm_weight=p.norm_weight.contiguous(),
    )
    struct = struct_of(p, sequences, out)
    if len(sequences.slots) and cpu.usable().nf4_cpu_gated_delta(ctypes.byref(struct), torch.get_num_threads()):
        raise cpu.KernelError(f"nf4_cpu_gated_delta refused {list(p.qkv.shape)}")
