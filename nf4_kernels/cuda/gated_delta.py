"""The gated delta rule on CUDA: one launch of csrc/cuda/gated_delta.cu, on every GPU from sm_80 on.

A thread block goes through the tokens of one value head of one sequence. That is as fast as the states' bytes for decode
steps; for long chunks a chunked form on tensor cores is faster.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from nf4_kernels.cuda.library import load_error, raise_for, usable
from nf4_kernels.gated_delta_params import GatedDelta, Sequences, struct_of

MAX_DIM = 128
"""Largest head of keys and of values."""
MAX_SEQUENCES = 65535
TAPS = 4
_COUNTERS = 1 << 16
_CAPTURE = -1
_counters: dict[tuple[int, int], Tensor] = {}


def takes(p: GatedDelta, sequences: int) -> bool:
    """Whether the launch computes these shapes on that device."""
    fits = all(4 <= dim <= MAX_DIM and dim % 4 == 0 for dim in (p.key_dim, p.value_dim))
    fits = fits and p.conv_weight.shape[1] == TAPS and 1 <= sequences <= MAX_SEQUENCES
    return fits and p.qkv.is_cuda and p.state.stride(0) % 4 == 0 and load_error() is None


def run(p: GatedDelta, sequences: Sequences, out: Tensor) -> None:
    """Write the results of arguments that takes() has taken to out [T, Hv dv]; rows of no sequence are left alone."""
    p = replace(
        p,
        qkv=_with_vectors(p.qkv),
        z=_with_vectors(p.z),
        conv_weight=p.conv_weight.contiguous(),
        norm_weight=p.norm_weight.contiguous(),
    )
    with torch.cuda.device(p.qkv.device):
        loaded = usable()
        struct = struct_of(p, sequences, out)
        struct.counters = _counters_on(p.qkv.device, struct.sequences * struct.key_heads).data_ptr()
        struct.stream = torch.cuda.current_stream(p.qkv.device).cuda_stream
        raise_for(loaded, loaded.nf4_cuda_gated_delta(ctypes.byref(struct)), f"gated delta rule of {list(p.qkv.shape)}")


def _with_vectors(x: Tensor) -> Tensor:
    """x, or a copy of it, whose rows can be read four elements at a time."""
    width = 4 * x.element_size()
    aligned = x.data_ptr() % width == 0 and x.stride(0) % 4 == 0 and x.stride(1) == 1
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _counters_on(device: torch.device, count: int) -> Tensor:
    """Zeros that a launch leaves as zeros, of the current stream. Captured graphs of a device share some of their own."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    capturing = torch.cuda.is_current_stream_capturing()
    key = (index, _CAPTURE if capturing else torch.cuda.current_stream(device).cuda_stream)
    # These must not be inference tensors, even if the first launch comes in inference mode: they outlive it.
    with torch.inference_mode(False):
        for new in () if capturing else (key, (index, _CAPTURE)):
            if new not in _counters:
                _counters[new] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
                torch.cuda.current_stream(device).synchronize()
    found = _counters.get(key)
    if found is None or len(found) < count:
        # Zeros of this launch alone; a graph that captures them zeroes them each time.
        return torch.zeros(count, dtype=torch.int32, device=device)
    return found
