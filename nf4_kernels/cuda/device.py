"""A GPU's compute capability, by which kernels and plans are chosen."""

from __future__ import annotations

import functools
import os

import torch

LEAST_CAPABILITY = (8, 0)
"""Of the oldest GPUs (A100) whose instructions the kernels use."""


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability (major, minor) of a CUDA device of this machine, as every choice of kernels sees it.

    NF4_POSE_AS=86 names another one, which must not be above the device's own: everything then runs as on such a GPU,
    except for bandwidth, the number of multiprocessors and cuBLAS. The library must have been built for it; Triton's kernels
    are compiled for it.
    Raises ValueError for a value that is no capability, and for one above the device's.
    """
    own, posed = torch.cuda.get_device_capability(device), _posed()
    if posed is None:
        return own
    if posed > own:
        raise ValueError(f"NF4_POSE_AS names capability {posed[0]}.{posed[1]}, and this GPU has {own[0]}.{own[1]}")
    return posed


def too_old(device: torch.device) -> str | None:
    """Why a CUDA device has no kernels; None if it is new enough."""
    own = capability(device)
    if own >= LEAST_CAPABILITY:
        return None
    return f"{torch.cuda.get_device_name(device)} has compute capability {own[0]}.{own[1]}, and 8.0 or newer is needed"


def arch(device: torch.device) -> int:
    """capability() as one number: 86 for (8, 6)."""
    major, minor = capability(device)
    return 10 * major + minor


def index_of(device: torch.device) -> int:
    """The index of a CUDA device; of the current one if it has none."""
    return device.index if device.index is not None else torch.cuda.current_device()


@functools.cache
def _posed() -> tuple[int, int] | None:
    value = os.environ.get("NF4_POSE_AS")
    if value is None:
        return None
    if not value.isdecimal() or len(value) < 2:
        raise ValueError(f"NF4_POSE_AS={value} is no compute capability such as 86")
    # Triton translates what it has compiled for that capability for the device's own.
    os.environ.setdefault("TRITON_OVERRIDE_ARCH", f"sm{value}")
    return int(value[:-1]), int(value[-1])
