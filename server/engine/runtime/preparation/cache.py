"""The KV cache of a model: its size, found by running a largest step where none is configured, and its backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from server.checkpoint.images import whole_images
from server.config import EngineConfig
from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions, LayerShape
from server.engine.runtime.attention.factory import auto_cache_dtype, check_cache_dtype, create_backend
from server.engine.runtime.attention.kernels.kv_cache import bytes_per_token, stored_dtype
from server.engine.runtime.attention.probe import probe_layers
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.limits import (
    CPU_CACHE_BYTES,
    own_limit,
    sequence_limit,
    token_budget,
)
from server.engine.runtime.memory import cache_bytes
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.sampling.sampler import Sampler
from server.engine.scheduling.sequence import Sequence
from server.types import GenerateRequest, SamplingParams


@dataclass(frozen=True)
class CacheSpec:
    """Layout of a model's cache and options of its attention, without the number of KV blocks."""

    shapes: list[LayerShape]
    options: list[AttentionOptions]
    sinks: dict[int, torch.Tensor]
    block_size: int
    dtype: torch.dtype
    """The activations' dtype."""
    device: torch.device
    cache_dtype: torch.dtype
    windowed_images: bool = False
    """See AttentionBackend."""

    @classmethod
    def of(cls, model: PreTrainedModel, config: EngineConfig) -> CacheSpec:
        """The spec of a model, which attends through our backends from here on. Raises UnsupportedModelError."""
        shapes, options, sinks = probe_layers(model)
        own = config.block_size, model.dtype, model.device
        check_cache_dtype(config.kv_cache_dtype, shapes, options, *own)
        return cls(
            shapes,
            options,
            sinks,
            *own,
            stored_dtype(config.kv_cache_dtype, auto_cache_dtype(model.dtype, model.device)),
            whole_images(model.config) == "windows",
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one KV block, all layers together."""
        return self.block_size * sum(bytes_per_token(shape, self.cache_dtype) for shape in self.shapes)

    def backend(self, num_blocks: int) -> AttentionBackend:
        """A new cache of num_blocks KV blocks, and the backend that owns it."""
        own = self.block_size, self.dtype, self.device, self.cache_dtype
        backend = create_backend(self.shapes, self.options, num_blocks, *own)
        backend.sinks = self.sinks
        backend.windowed_images = self.windowed_images
        backend.windows = {layer: options.window for layer, options in enumerate(self.options)}
        return backend


PagedWith = Callable[[int], PagedModel]
"""The model over a new cache of a number of KV blocks."""


def cache_budget(model: PreTrainedModel, paged_with: PagedWith, bytes_per_block: int, config: EngineConfig) -> int:
    """Bytes for the cache: those configured, else what a largest step leaves on CUDA, else a constant.

    Raises torch.OutOfMemoryError where the memory does not hold a largest step.
    """
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    device = model.device
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    return cache_bytes(lambda: run_largest_step(model, paged_with, config) * bytes_per_block, device)


@torch.inference_mode()
def run_largest_step(model: PreTrainedModel, paged_with: PagedWith, config: EngineConfig) -> int:
    """Run as large a step as the scheduler may make, in a cache that holds just that; returns the cache's blocks."""
    device, block_size, text = model.device, config.block_size, model.config.get_text_config()
    sequences = sequence_limit(config, device)
    count = max(token_budget(config, device), sequences)
    length = min(count, own_limit(text) or count)
    count = min(count, sequences * length)
    blocks_each = -(-length // block_size)
    spans = []
    num_blocks = 0
    for row in range(0, count, length):
        own = min(length, count - row)
        end = num_blocks + -(-own // block_size)
        spans.append(Span(row, 0, own, range(num_blocks, end)))
        num_blocks = end
    paged = paged_with(num_blocks)
    rows = torch.arange(count, device=device)
    positions = rows % length
    slots = rows // length * blocks_each * block_size + positions
    wanted = rows[-sequences:]
    batch = Batch(rows % text.vocab_size, positions, slots, wanted, Spans.of(spans), int(count == 1))
    # Sampling with top_p takes the most memory.
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    filtered = Sequence(GenerateRequest("largest step", [0], params), seed=0)
    Sampler(paged.vocab_size, device).sample(paged.run(batch), [filtered] * len(wanted))
    return num_blocks
