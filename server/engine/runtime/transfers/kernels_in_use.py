"""Whether results and inputs go through our launches (step_kernels.py) or torch's copies."""

from __future__ import annotations

import logging

import torch

from server.engine.runtime.attention.graph_backend import HostLayout
from server.engine.runtime.trials import failure
from server.engine.scheduling.sequence import PLACEHOLDER

logger = logging.getLogger(__name__)


class _Tried:
    """Finding of use_step_kernels()."""

    usable = False


def has_step_kernels(tensor: torch.Tensor) -> bool:
    """Whether our launches take what is on this tensor's device."""
    return tensor.is_cuda and _Tried.usable


def use_step_kernels(device: torch.device) -> None:
    """Let steps' results and inputs go through our launches on a CUDA device, if these do what they should.

    They are tried, and so compiled, before a step waits for them.
    """
    failed = failure(lambda: _try(device))
    _Tried.usable = failed is None
    if failed is not None:
        logger.warning("steps' results and inputs are copied by torch, more slowly: our kernels fail: %s", failed)


def _try(device: torch.device) -> None:
    """Raises what a launch raises, and ValueError where one writes something else."""
    # Triton is not installed without CUDA.
    from server.engine.runtime.transfers.step_kernels import lay_out, post

    given = torch.tensor([[5, PLACEHOLDER, 7], [11, 12, 13], [21, 22, 23], [9, 1, 9]]).pin_memory()
    numbers = torch.arange(100, 105, dtype=torch.int32).pin_memory()
    new = torch.tensor([[3, 1], [70, 71]]).pin_memory()
    # Each in memory of its own: the kernels are compiled for addresses that are multiples of 16, as all later ones are.
    written, tables = (torch.zeros(6, dtype=torch.int32, device=device) for _ in range(2))
    layout = HostLayout(written, numbers, 4, tables, new, 2)
    inputs, newest = torch.zeros(3, 3, dtype=torch.int64, device=device), torch.tensor([40, 41], device=device)
    copied, times = torch.zeros(6).pin_memory(), torch.zeros(2, dtype=torch.int64).pin_memory()
    lay_out(inputs, given, None, PLACEHOLDER, None)
    first = inputs.tolist()
    lay_out(inputs, given, newest, PLACEHOLDER, layout)
    own = post(torch.arange(3.0, device=device), inputs[1].clone(), copied, newest, times)
    # Reading what is on the device waits for the launches, which write to the host's memory, too.
    found = [first[0], *(t.tolist() for t in (inputs, written, tables, own, copied, times))]
    expected = [
        [5, PLACEHOLDER, 7],
        [[5, 41, 7], [11, 12, 13], [21, 22, 23]],
        [100, 101, 102, 103, 0, 0],
        [0, 71, 0, 70, 0, 0],
        [11, 12, 13],
        [0.0, 1.0, 2.0, 11.0, 12.0, 13.0],
        [40, 41],
    ]
    if found != expected:
        raise ValueError(f"they write {found} instead of {expected}")
