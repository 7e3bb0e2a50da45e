"""Which attention backend runs where."""

from __future__ import annotations

import torch

from server.engine.runtime.attention.base import AttentionBackend, LayerShape
from server.engine.runtime.attention.sdpa import SdpaBackend


def create_backend(
    shapes: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """The backend for a device, with its cache allocated."""
    return SdpaBackend(shapes, num_blocks, block_size, dtype, device)
