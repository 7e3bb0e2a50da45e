"""Which attention backend runs where."""

from __future__ import annotations

import importlib.util
import logging

import torch

from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions, LayerShape
from server.engine.runtime.attention.paged_cpu import PagedCpuBackend, paged_cpu_error
from server.engine.runtime.attention.sdpa import SdpaBackend

logger = logging.getLogger(__name__)

FLASHINFER_DIMS = (64, 128, 256)


def create_backend(
    shapes: list[LayerShape],
    options: list[AttentionOptions],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend:
    """The backend for a device, with its cache allocated: the fast one where it can run, else the reference."""
    if device.type == "cpu":
        reason = paged_cpu_error(dtype)
        if reason is None:
            return PagedCpuBackend(shapes, options, num_blocks, block_size, dtype, device)
        logger.warning("attention runs on torch's SDPA, slower than our own: %s", reason)
        return SdpaBackend(shapes, num_blocks, block_size, dtype, device)
    reason = _flashinfer_unusable(shapes, dtype)
    if reason is None:
        from server.engine.runtime.attention.flashinfer import FlashInferBackend

        return FlashInferBackend(shapes, options, num_blocks, block_size, dtype, device)
    logger.warning("attention runs on torch's SDPA, much slower than FlashInfer, and without CUDA graphs: %s", reason)
    return SdpaBackend(shapes, num_blocks, block_size, dtype, device)


def _flashinfer_unusable(shapes: list[LayerShape], dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install 'nf4-server[cuda]')"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer has no kernels for {dtype}"
    for shape in shapes:
        if shape.key_dim != shape.value_dim or shape.key_dim not in FLASHINFER_DIMS:
            return f"FlashInfer has no kernels for heads of {shape.key_dim} and {shape.value_dim}"
    return None
