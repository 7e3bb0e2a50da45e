"""Which attention backend runs where."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch

from server.config import default_cache_dir
from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions, LayerShape
from server.engine.runtime.attention.compiler import missing_compiler, prepare_compiler
from server.engine.runtime.attention.paged_cpu import PagedCpuBackend, paged_cpu_error
from server.engine.runtime.attention.sdpa import SdpaBackend
from server.engine.runtime.batch import Batch, Span

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
    if flashinfer_error(tuple(shapes), tuple(options), block_size, dtype, device) is None:
        from server.engine.runtime.attention.flashinfer import FlashInferBackend

        return FlashInferBackend(shapes, options, num_blocks, block_size, dtype, device)
    return SdpaBackend(shapes, num_blocks, block_size, dtype, device)


@functools.cache
def flashinfer_error(
    shapes: tuple[LayerShape, ...],
    options: tuple[AttentionOptions, ...],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why FlashInfer cannot run these layers, logged once with what runs instead; None when it has run them.

    Raises torch.OutOfMemoryError and torch.AcceleratorError, which are not FlashInfer's.
    """
    reason = _flashinfer_unsuitable(shapes, dtype)
    if reason is None:
        try:
            _try_flashinfer(list(shapes), list(options), block_size, dtype, device)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as e:
            logger.debug("FlashInfer's failure", exc_info=True)
            reason = missing_compiler() or f"FlashInfer fails (pip install 'nf4-server[cuda]'): {summary(e)}"
    if reason is not None:
        logger.warning("attention runs on torch's SDPA, much slower and without CUDA graphs: %s", reason)
    return reason


def try_layers(
    backend: AttentionBackend,
    shapes: list[LayerShape],
    options: list[AttentionOptions],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run a token at the start of block 0 through one layer of each kind, which compiles what the kind needs."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    backend.begin(Batch(zero, zero, zero, zero, (Span(0, 0, 1, (0,)),), 1))
    for shape, option in dict.fromkeys(zip(shapes, options, strict=True)):
        layer = next(i for i, kind in enumerate(zip(shapes, options, strict=True)) if kind == (shape, option))
        query = torch.zeros(1, shape.heads, shape.key_dim, dtype=dtype, device=device)
        key = torch.zeros(1, shape.kv_heads, shape.key_dim, dtype=dtype, device=device)
        value = torch.zeros(1, shape.kv_heads, shape.value_dim, dtype=dtype, device=device)
        backend.attend(layer, query, key, value, option)


def summary(error: BaseException) -> str:
    """The line of an error's message that says most: a compiler's first error, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line or "error " in line]
    return f"{type(error).__name__}: {[*telling, *lines, 'no message'][0][:300]}"


def _try_flashinfer(
    shapes: list[LayerShape], options: list[AttentionOptions], block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    from server.engine.runtime.attention.flashinfer import FlashInferBackend

    # Its logger writes past ours, in a format of its own; that it compiles is said here.
    os.environ.setdefault("FLASHINFER_LOGGING_LEVEL", "error")
    prepare_compiler(default_cache_dir())
    logger.info("loading FlashInfer's attention; the first time on this GPU it is compiled, which takes minutes")
    backend = FlashInferBackend(shapes, options, 1, block_size, dtype, device)
    try_layers(backend, shapes, options, dtype, device)


def _flashinfer_unsuitable(shapes: tuple[LayerShape, ...], dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install 'nf4-server[cuda]')"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer has no kernels for {dtype}"
    for shape in shapes:
        if shape.key_dim != shape.value_dim or shape.key_dim not in FLASHINFER_DIMS:
            return f"FlashInfer has no kernels for heads of {shape.key_dim} and {shape.value_dim}"
    return None
