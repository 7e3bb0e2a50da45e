"""The KV cache of one layer on a GPU, in 16 bits or in 8 with scales, and layers that attend alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from server.config import KVCacheDtype
from server.engine.runtime.attention.base import AttentionOptions, LayerShape

_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
SCALE_BYTES = 4


@dataclass(frozen=True)
class Kind:
    """Layers that attend alike share a plan."""

    heads: int
    kv_heads: int
    dim: int
    options: AttentionOptions


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer. In 8 bits each token's key and value have a scale for each key head."""

    data: torch.Tensor
    """[blocks, 2, block_size, kv_heads, dim], keys and values. In memory a KV block's tokens lie one after another, or its
    heads: zeros() makes the latter for 8 bits, whose rows of one head and token are shorter."""
    scales: torch.Tensor | None
    """float32 [blocks, 2, kv_heads, block_size], those of a head beside one another, as a thread block reads them. What data
    stands for is data * scales. None: data is in 16 bits."""

    @classmethod
    def zeros(
        cls, shape: LayerShape, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        """An empty cache of `blocks` KV blocks; dtype has 16 bits or is int8 or float8_e4m3fn."""
        sizes = blocks, 2, block_size, shape.kv_heads, shape.key_dim
        if dtype.itemsize > 1:
            return cls(torch.zeros(sizes, dtype=dtype, device=device), None)
        heads_first = blocks, 2, shape.kv_heads, block_size, shape.key_dim
        data = torch.zeros(heads_first, dtype=dtype, device=device).transpose(2, 3)
        return cls(data, torch.zeros(blocks, 2, shape.kv_heads, block_size, dtype=torch.float32, device=device))


def stored_dtype(name: KVCacheDtype, auto: torch.dtype) -> torch.dtype:
    """The dtype of the cache's data for engine.kv_cache_dtype; auto is the one that auto means."""
    return auto if name == "auto" else _DTYPES[name]


def bytes_per_token(shape: LayerShape, dtype: torch.dtype) -> int:
    """Cache bytes that one token takes in a layer, scales included."""
    rows = (1 if shape.is_latent else 2) * shape.kv_heads
    scales = rows * SCALE_BYTES if dtype.itemsize == 1 else 0
    return shape.bytes_per_token(dtype.itemsize) + scales
