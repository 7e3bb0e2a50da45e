"""The KV cache of one layer on a GPU, in 16 bits or in 8 with scales, and layers that attend alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from server.config import KVCacheDtype
from server.engine.runtime.attention.base import AttentionOptions, LayerShape

_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
SCALE_BYTES = 4
_MAX_LATENT_GROUP = 16
"""Rows of the smallest matrix multiplication of a GPU: more are no faster, and their sums would not fit in registers."""


@dataclass(frozen=True)
class Kind:
    """Layers that attend alike share a plan."""

    heads: int
    kv_heads: int
    dim: int
    """Elements of a query."""
    options: AttentionOptions
    is_latent: bool = False

    @classmethod
    def of(cls, shape: LayerShape, options: AttentionOptions) -> Kind:
        """The kind of a layer of that shape."""
        return cls(shape.heads, shape.kv_heads, shape.key_dim, options, shape.is_latent)

    @property
    def groups(self) -> int:
        """See head_groups()."""
        return head_groups(self.heads, self.kv_heads, self.is_latent)

    @property
    def value_dim(self) -> int:
        """Elements of a result."""
        return latent_value_dim(self.dim) if self.is_latent else self.dim


def latent_value_dim(dim: int) -> int:
    """Columns of a latent that are its value, of all dim, for which there are kernels: the greatest power of 2."""
    return int(1 << (dim.bit_length() - 1))


def head_groups(heads: int, kv_heads: int, is_latent: bool) -> int:
    """Groups of query heads; a thread block attends for one. They share a key head, or are a few that divide the heads."""
    if not is_latent:
        return kv_heads
    return heads // max(size for size in range(1, _MAX_LATENT_GROUP + 1) if heads % size == 0)


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, or latents. In 8 bits each token's key and value have a scale for each key head."""

    data: torch.Tensor
    """[blocks, 2, block_size, kv_heads, dim], keys and values. In memory a KV block's tokens lie one after another, or its
    heads: zeros() makes the latter for 8 bits, whose rows of one head and token are shorter.
    Of latents [blocks, 1, block_size, 1, dim], of which the first columns are the value."""
    scales: torch.Tensor | None
    """float32 [blocks, 2, kv_heads, block_size], those of a head beside one another, as a thread block reads them. What data
    stands for is data * scales. None: data is in 16 bits."""

    @classmethod
    def zeros(
        cls, shape: LayerShape, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerCache:
        """An empty cache of `blocks` KV blocks; dtype has 16 bits or is int8 or float8_e4m3fn."""
        sizes = blocks, 1 if shape.is_latent else 2, block_size, shape.kv_heads, shape.key_dim
        if dtype.itemsize > 1:
            return cls(torch.zeros(sizes, dtype=dtype, device=device), None)
        heads_first = blocks, 2, shape.kv_heads, block_size, shape.key_dim
        data = torch.zeros(heads_first, dtype=dtype, device=device).transpose(2, 3)
        return cls(data, torch.zeros(blocks, 2, shape.kv_heads, block_size, dtype=torch.float32, device=device))

    @property
    def is_latent(self) -> bool:
        """Whether it holds latents."""
        return self.data.shape[1] == 1

    def groups(self, heads: int) -> int:
        """head_groups() of a layer with so many query heads."""
        return head_groups(heads, self.data.shape[3], self.is_latent)


def stored_dtype(name: KVCacheDtype, auto: torch.dtype) -> torch.dtype:
    """The dtype of the cache's data for engine.kv_cache_dtype; auto is the one that auto means."""
    return auto if name == "auto" else _DTYPES[name]


def bytes_per_token(shape: LayerShape, dtype: torch.dtype) -> int:
    """Cache bytes that one token takes in a layer, scales included."""
    rows = (1 if shape.is_latent else 2) * shape.kv_heads
    scales = rows * SCALE_BYTES if dtype.itemsize == 1 else 0
    return shape.bytes_per_token(dtype.itemsize) + scales
