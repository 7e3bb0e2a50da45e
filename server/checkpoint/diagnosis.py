"""What is wrong with a checkpoint, in one line that names the tensor or file."""

from __future__ import annotations

from pathlib import Path

import torch
from bitsandbytes.nn import Params4bit
from torch import nn

from server.checkpoint.base import CheckpointError


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def check_finite(folder: Path, model: nn.Module) -> None:
    """Raise CheckpointError, by name, for a parameter with values that are not finite numbers.

    Such a model would start, and then fail with every request. The sum of a parameter is not finite if one of its values is
    not, and takes no memory.
    """
    floats = [
        (name, p)
        for name, p in model.named_parameters()
        if p.is_floating_point() and p.numel() and not isinstance(p, Params4bit)
    ]
    if not floats:
        return
    sums = torch.stack([parameter.detach().sum(dtype=torch.float32) for _, parameter in floats])
    for (name, parameter), finite in zip(floats, sums.isfinite().tolist(), strict=True):
        if not finite and not bool(parameter.isfinite().all()):
            raise CheckpointError(f"{folder}: damaged: {name} has values that are not finite numbers")
