"""The workspaces of GEMMs on CUDA: what their launches leave in memory for one another."""

from __future__ import annotations

import torch
from torch import Tensor

from nf4_kernels.plan import COUNTERS, WORKSPACE_BYTES

_workspaces: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
_CAPTURE = -1


def workspace_on(device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Partial sums and zeroed counters of the current stream. Captured graphs of a device share one of their own.

    None while capturing on a device where no GEMM has run yet: nothing can be zeroed then.
    """
    index = device.index if device.index is not None else torch.cuda.current_device()
    capturing = torch.cuda.is_current_stream_capturing()
    if not capturing and (index, _CAPTURE) not in _workspaces:
        _workspaces[index, _CAPTURE] = _new_workspace(device)
        torch.cuda.current_stream(device).synchronize()
    key = (index, _CAPTURE if capturing else torch.cuda.current_stream(device).cuda_stream)
    if key not in _workspaces and not capturing:
        _workspaces[key] = _new_workspace(device)
    return _workspaces.get(key)


def _new_workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    # These must not be inference tensors, even if the first GEMM runs in inference mode: they outlive it.
    with torch.inference_mode(False):
        partial = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return partial, torch.zeros(COUNTERS, dtype=torch.int32, device=device)
