"""Chooses the attention backend for a model and a device."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterable
from typing import Any

import torch

from nf4_kernels.cuda.device import capability
from server.config import KVCacheDtype
from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions, LayerShape, UnsupportedModelError
from server.engine.runtime.attention.kernels.kv_cache import stored_dtype
from server.engine.runtime.attention.paged_cpu import PagedCpuBackend, paged_cpu_error
from server.engine.runtime.attention.sdpa import SdpaBackend
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.trials import failure

logger = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256, 512)
LATENT_RANKS, LATENT_ROTARY = (256, 512), (16, 32, 64, 128)
"""Columns of latents with kernels, without the rotary ones, and rotary columns."""


def create_backend(
    shapes: list[LayerShape],
    options: list[AttentionOptions],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    cache_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """The backend for a device, with its cache allocated: the fast one where it can run, else the reference.

    cache_dtype: the dtype of keys and values; None means what auto_cache_dtype() gives. For one of 8
    bits see check_cache_dtype().
    """
    if device.type == "cpu":
        reason = paged_cpu_error()
        if reason is None:
            return PagedCpuBackend(shapes, options, num_blocks, block_size, device)
        logger.warning("attention runs on torch's SDPA, slower than our own: %s", reason)
        return SdpaBackend(shapes, num_blocks, block_size, dtype, device)
    stored = dtype if cache_dtype is None else cache_dtype
    if stored.itemsize == 1 or cuda_error(tuple(shapes), tuple(options), block_size, dtype, device) is None:
        return _cuda_backend(shapes, options, num_blocks, block_size, stored, device)
    return SdpaBackend(shapes, num_blocks, block_size, dtype, device)


def has_kernels(shape: LayerShape) -> bool:
    """Whether there are CUDA kernels for such keys and values, or latents."""
    if shape.is_latent:
        rest = shape.key_dim - shape.value_dim
        return shape.value_dim in LATENT_RANKS and rest in LATENT_ROTARY
    return shape.key_dim == shape.value_dim and shape.key_dim in HEAD_DIMS


def _cuda_backend(*given: Any) -> AttentionBackend:
    # Triton is not installed without CUDA.
    from server.engine.runtime.attention.paged_cuda import CudaBackend

    return CudaBackend(*given)


def auto_cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that keys and values are kept in, for activations of dtype: float32 where our own attention on CPU runs."""
    return torch.float32 if device.type == "cpu" and paged_cpu_error() is None else dtype


@functools.cache
def cuda_error(
    shapes: tuple[LayerShape, ...],
    options: tuple[AttentionOptions, ...],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why our kernels cannot attend for these layers on CUDA, logged once; None when they have done so.

    Raises torch.OutOfMemoryError and torch.AcceleratorError, which are not the kernels'.
    """
    reason = _unsuitable(shapes, dtype)
    if reason is None:
        reason = failure(lambda: _try_cuda(list(shapes), list(options), block_size, dtype, dtype, device))
    if reason is not None:
        logger.warning("attention runs on torch's SDPA, much slower and without CUDA graphs: %s", reason)
    return reason


def _try_cuda(
    shapes: list[LayerShape],
    options: list[AttentionOptions],
    block_size: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    device: torch.device,
) -> None:
    backend = _cuda_backend(shapes, options, 4, block_size, stored, device)
    sinks = [torch.zeros(shape.heads, device=device) for shape in shapes]
    backend.sinks = {layer: sinks[layer] for layer, option in enumerate(options) if option.sinks}
    for tokens in (1, 2):
        try_layers(backend, shapes, options, block_size, dtype, device, tokens)


def check_cache_dtype(
    name: KVCacheDtype,
    shapes: list[LayerShape],
    options: list[AttentionOptions],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise UnsupportedModelError, which names what is missing, where the cache cannot have engine.kv_cache_dtype."""
    if name == "auto":
        return
    reason = _eight_bits_unsuitable(name, shapes, dtype, device)
    if reason is None:
        stored = stored_dtype(name, dtype)
        reason = failure(lambda: _try_cuda(shapes, options, block_size, dtype, stored, device))
    if reason is not None:
        raise UnsupportedModelError(f"engine.kv_cache_dtype: {name} cannot be used: {reason}")


def _eight_bits_unsuitable(
    name: KVCacheDtype, shapes: list[LayerShape], dtype: torch.dtype, device: torch.device
) -> str | None:
    if device.type != "cuda":
        return "it needs CUDA"
    if name == "fp8_e4m3" and capability(device) < (8, 9):
        return "this GPU does not compute in fp8 (int8 works)"
    if any(shape.is_latent for shape in shapes):
        return "latents are kept in 16 bits, in which a token takes less memory than its heads would in 8"
    return _unsuitable(shapes, dtype)


def _unsuitable(shapes: Iterable[LayerShape], dtype: torch.dtype) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"activations are in {dtype}, and the kernels take bfloat16 and float16"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    for shape in shapes:
        if not has_kernels(shape):
            what = "latents" if shape.is_latent else "heads"
            return f"there are no kernels for {what} of {shape.key_dim} and {shape.value_dim}"
    return None


def try_layers(
    backend: AttentionBackend,
    shapes: list[LayerShape],
    options: list[AttentionOptions],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int = 1,
) -> None:
    """Run tokens that begin in block 0 through one layer of each kind, which compiles what the kind needs."""
    places = torch.arange(tokens, device=device)
    spans = Spans.of([Span(0, 0, tokens, range(-(-tokens // block_size)))])
    backend.begin(Batch(torch.zeros_like(places), places, places, places[-1:], spans, int(tokens == 1)))
    for shape, option in dict.fromkeys(zip(shapes, options, strict=True)):
        layer = next(i for i, kind in enumerate(zip(shapes, options, strict=True)) if kind == (shape, option))
        query = torch.zeros(tokens, shape.heads, shape.key_dim, dtype=dtype, device=device)
        key = torch.zeros(tokens, shape.kv_heads, shape.key_dim, dtype=dtype, device=device)
        value = torch.zeros(tokens, shape.kv_heads, shape.value_dim, dtype=dtype, device=device)
        backend.attend(layer, query, key, value, option)
