"""The kernels for options on CUDA, once use_device_options() (option_trials.py) has tried them."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor


class DeviceOptions:
    """See triton_options.py; None: torch's operations run instead."""

    penalize_rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None] | None = None
    mask_rows: Callable[[Tensor, Tensor, Tensor], None] | None = None
