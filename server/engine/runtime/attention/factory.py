"""Chooses the attention backend for a model and a device."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Iterable

import torch

from server.config import KVCacheDtype, default_cache_dir
from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions, LayerShape, UnsupportedModelError
from server.engine.runtime.attention.flashinfer.compiler import missing_compiler, prepare_compiler
from server.engine.runtime.attention.kernels.kv_cache import stored_dtype
from server.engine.runtime.attention.paged_cpu import PagedCpuBackend, paged_cpu_error
from server.engine.runtime.attention.sdpa import SdpaBackend
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.trials import failure

logger = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)


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

    cache_dtype: the dtype of keys and values; None means what auto_cache_dtype() gives. A dtype of 8 bits takes the Triton
    backend, see check_cache_dtype().
    """
    if cache_dtype is not None and cache_dtype.itemsize == 1:
        from server.engine.runtime.attention.paged_triton import TritonBackend

        return TritonBackend(shapes, options, num_blocks, block_size, cache_dtype, device)
    if device.type == "cpu":
        reason = paged_cpu_error()
        if reason is None:
            return PagedCpuBackend(shapes, options, num_blocks, block_size, device)
        logger.warning("attention runs on torch's SDPA, slower than our own: %s", reason)
        return SdpaBackend(shapes, num_blocks, block_size, dtype, device)
    if flashinfer_error(tuple(shapes), tuple(options), block_size, dtype, device) is None:
        from server.engine.runtime.attention.flashinfer.backend import FlashInferBackend

        chunks = long_chunks_kernels(tuple(shapes), tuple(options), block_size, dtype, device)
        return FlashInferBackend(shapes, options, num_blocks, block_size, dtype, device, chunks)
    return SdpaBackend(shapes, num_blocks, block_size, dtype, device)


def auto_cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype that keys and values are kept in, for activations of dtype: float32 where our own attention on CPU runs."""
    return torch.float32 if device.type == "cpu" and paged_cpu_error() is None else dtype


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
        failed = failure(lambda: _load_flashinfer(list(shapes), list(options), block_size, dtype, device))
        if failed is not None:
            reason = missing_compiler() or f"FlashInfer fails (pip install 'nf4-server[cuda]'): {failed}"
    if reason is not None:
        logger.warning("attention runs on torch's SDPA, much slower and without CUDA graphs: %s", reason)
    return reason


@functools.cache
def long_chunks_kernels(
    shapes: tuple[LayerShape, ...],
    options: tuple[AttentionOptions, ...],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Name the kernels of FlashInfer that are faster than its others for prompts' chunks: FA3 on Hopper, None elsewhere.

    Raises torch.OutOfMemoryError and torch.AcceleratorError, which are not FlashInfer's.
    """
    from server.engine.runtime.attention.flashinfer.backend import is_plain

    plain = [(shape, option) for shape, option in zip(shapes, options, strict=True) if is_plain(option)]
    if not plain or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    logger.info("loading FlashInfer's attention for long prompts; it, too, is compiled the first time")
    plain_shapes, plain_options = [shape for shape, _ in plain], [option for _, option in plain]
    failed = failure(lambda: _try_flashinfer(plain_shapes, plain_options, block_size, dtype, device, "fa3"))
    if failed is None:
        return "fa3"
    logger.warning("prompts' attention runs on FlashInfer's FA2 kernels, slower than FA3, which fail: %s", failed)
    return None


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
        from server.engine.runtime.attention.paged_triton import TritonBackend

        def attempt() -> None:
            backend = TritonBackend(shapes, options, 4, block_size, stored_dtype(name, dtype), device)
            for tokens in (1, 2):
                try_layers(backend, shapes, options, block_size, dtype, device, tokens)

        reason = failure(attempt)
    if reason is not None:
        raise UnsupportedModelError(f"engine.kv_cache_dtype: {name} cannot be used: {reason}")


def _eight_bits_unsuitable(
    name: KVCacheDtype, shapes: list[LayerShape], dtype: torch.dtype, device: torch.device
) -> str | None:
    if device.type != "cuda":
        return "it needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"activations are in {dtype}, and the kernels take bfloat16 and float16"
    if name == "fp8_e4m3" and torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU does not compute in fp8 (int8 works)"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return _odd_heads(shapes)


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


def _load_flashinfer(
    shapes: list[LayerShape], options: list[AttentionOptions], block_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    # FlashInfer's logger does not write to ours, and has a format of its own. So this line says that it compiles.
    os.environ.setdefault("FLASHINFER_LOGGING_LEVEL", "error")
    prepare_compiler(default_cache_dir())
    logger.info("loading FlashInfer's attention; the first time on this GPU it is compiled, which takes minutes")
    _try_flashinfer(shapes, options, block_size, dtype, device)


def _try_flashinfer(
    shapes: list[LayerShape],
    options: list[AttentionOptions],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    long_chunks: str | None = None,
) -> None:
    from server.engine.runtime.attention.flashinfer.backend import LONG_CHUNKS, FlashInferBackend

    tokens = LONG_CHUNKS if long_chunks else 1
    backend = FlashInferBackend(shapes, options, -(-tokens // block_size), block_size, dtype, device, long_chunks)
    sinks = [torch.zeros(shape.heads, device=device) for shape in shapes]
    backend.sinks = {layer: sinks[layer] for layer, option in enumerate(options) if option.sinks}
    try_layers(backend, shapes, options, block_size, dtype, device, tokens)


def _flashinfer_unsuitable(shapes: tuple[LayerShape, ...], dtype: torch.dtype) -> str | None:
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install 'nf4-server[cuda]')"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer has no kernels for {dtype}"
    return _odd_heads(shapes)


def _odd_heads(shapes: Iterable[LayerShape]) -> str | None:
    for shape in shapes:
        if shape.key_dim != shape.value_dim or shape.key_dim not in HEAD_DIMS:
            return f"there are no kernels for heads of {shape.key_dim} and {shape.value_dim}"
    return None
