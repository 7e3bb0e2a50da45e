"""Attention of decode steps on Hopper GPUs: of each sequence's newest token, whose key and value go into the paged cache.

What a launch computes is laid out in items: a part of a sequence's keys each. Parts of one sequence are reduced in their
order by the thread block that ends last, so that bits do not change from run to run.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nf4_kernels.cuda.device import capability
from nf4_kernels.cuda.library import DecodeAttention, load_error, raise_for, usable
from nf4_kernels.params import DTYPES

BLOCK_SIZE, DIM, MOST_GROUP = 16, 128, 8
MOST_PARTS = 512
"""Items that a sequence may have: 32 groups of 16, which a warp reduces at once."""
ITEM_FIELDS = 8
"""Numbers of an item: the row of query, key and value; its first key; the key behind its last; the newest key; the
sequence's first item and number of items; the sequence's row of the block tables; one that is not read."""


@dataclass(frozen=True)
class Instance:
    """A form of the kernel."""

    warps: int
    """Warps of a thread block, which takes an item and a key head."""
    stages: int
    """KV blocks that are on their way to a warp."""
    per_processor: int
    """Thread blocks of a multiprocessor."""


# Up to how many thread blocks for each multiprocessor, with sequences in one part, an instance is taken. On an H200 others
# take longer (docs/lab/0011-decode-attention.md).
_OF_FEW = (
    (1, Instance(8, 2, 1)),
    (2, Instance(4, 2, 2)),
    (3, Instance(4, 2, 3)),
    (5, Instance(2, 3, 4)),
    (8, Instance(1, 3, 8)),
)
_OF_ONE_SEQUENCE = Instance(4, 2, 2)
# More thread blocks are as few waves as there can be, each as full as the others: 150 sequences of 1000 tokens take 151 us
# instead of 173 (docs/lab/0011-decode-attention.md). With three stages nine thread blocks fit a multiprocessor.
_MOST_OF_WAVE, _MOST_OF_THREE_STAGES = 13, 9
INSTANCES = (*(instance for _, instance in _OF_FEW), Instance(1, 2, _MOST_OF_WAVE))
"""All warps and stages that there are, the last one with the most thread blocks of a multiprocessor."""


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of queries and new keys, in float32 and rounded once, and norms of their heads in front of it."""

    cos: Tensor
    """[T, dim], contiguous, in the queries' dtype."""
    sin: Tensor
    """[T, dim], contiguous."""
    norms: tuple[Tensor, Tensor] | None = None
    """The norms' weights for queries and for keys, each [dim], contiguous."""
    eps: float = 0.0
    """Added to mean squares."""
    offset: float = 0.0
    """Added to the norms' weights: 1 in Gemma."""


@dataclass(frozen=True)
class Layout:
    """Keys of each thread block, on the device."""

    numbers: Tensor
    """int32; how many items there are is at `counted`, and the items, ITEM_FIELDS numbers each, begin at `first`, a multiple
    of 4. No sequence has more than MOST_PARTS."""
    counted: int
    first: int
    items: int
    """Items that the launch has thread blocks for."""
    tables: Tensor
    """int32 [any, KV blocks of the longest sequence], contiguous: the KV blocks of each sequence."""


@dataclass(frozen=True)
class Workspace:
    """Partial results of sequences' keys for the thread block that reduces them; launches in turn may share it."""

    sums: Tensor
    """float32 [items * heads * DIM]."""
    weights: Tensor
    """float32 [items * heads * 2]."""
    arrived: Tensor
    """int32 [items * key heads], zeros between launches."""


def can_attend(device: torch.device, dtype: torch.dtype, block_size: int, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether decode_attention() runs on that device of this machine with such a cache and such queries."""
    return (
        device.type == "cuda"
        and capability(device) == (9, 0)
        and dtype in (torch.float16, torch.bfloat16)
        and (block_size, dim) == (BLOCK_SIZE, DIM)
        and heads % kv_heads == 0
        and heads // kv_heads <= MOST_GROUP
        and load_error() is None
    )


def instance_for(sequences: int, kv_heads: int, processors: int) -> Instance:
    """The form that is quickest for a step of so many sequences, on a device with so many multiprocessors."""
    if sequences == 1:
        return _OF_ONE_SEQUENCE
    blocks = sequences * kv_heads / processors
    for most, instance in _OF_FEW:
        if blocks <= most:
            return instance
    per_processor = math.ceil(blocks / math.ceil(blocks / _MOST_OF_WAVE))
    return Instance(1, 3 if per_processor <= _MOST_OF_THREE_STAGES else 2, per_processor)


def _check(cache: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
    """ValueError says what the kernel does not take."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if cache.dtype not in (torch.float16, torch.bfloat16) or any(t.dtype != cache.dtype for t in (query, key, value)):
        raise ValueError(f"cache, query, key and value must be float16 or bfloat16 alike, got {cache.dtype}")
    if tuple(cache.shape[1:]) != (2, BLOCK_SIZE, kv_heads, DIM) or not cache.is_contiguous():
        expected = f"contiguous [blocks, 2, {BLOCK_SIZE}, {kv_heads}, {DIM}]"
        raise ValueError(f"cache has shape {tuple(cache.shape)}; it must be {expected}")
    if heads % kv_heads or heads // kv_heads > MOST_GROUP:
        raise ValueError(f"{heads} query heads share {kv_heads} key heads; up to {MOST_GROUP} may share one")
    if any(t.stride(2) != 1 or t.stride(0) % 2 or t.stride(1) % 2 for t in (query, key, value)):
        raise ValueError("query, key and value need even strides and a contiguous last dimension")


def decode_attention(
    cache: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    layout: Layout,
    workspace: Workspace,
    instance: Instance,
    scaling: float,
    rotation: Rotation | None = None,
    tile: int = 0,
) -> None:
    """Write keys and values of T sequences' newest tokens into cache, and their attention into out.

    cache [blocks, 2, BLOCK_SIZE, kv_heads, DIM], contiguous, keys and values; query [T, heads, DIM], key and value [T,
    kv_heads, DIM], any even strides with a contiguous last dimension; all of cache's dtype on one device. out [T, heads,
    DIM], or where tile is not 0 the shape of reference.tile_activations([T, heads * DIM], tile), whose places behind the
    tokens keep what they have; contiguous. Scores are multiplied by `scaling`. Raises ValueError for a cache, heads or
    strides that the kernel does not take, and KernelError where the launch fails.
    """
    _check(cache, query, key, value)
    heads, kv_heads = query.shape[1], key.shape[1]
    norms = (None, None) if rotation is None or rotation.norms is None else rotation.norms
    struct = DecodeAttention(
        **{
            name: None if tensor is None else tensor.data_ptr()
            for name, tensor in {
                "cache": cache, "query": query, "key": key, "value": value, "out": out,
                "numbers": layout.numbers, "tables": layout.tables,
                "sums": workspace.sums, "weights": workspace.weights, "arrived": workspace.arrived,
                "cosines": None if rotation is None else rotation.cos,
                "sines": None if rotation is None else rotation.sin,
                "query_norm": norms[0], "key_norm": norms[1],
            }.items()
        },
        items=layout.numbers.data_ptr() + layout.first * layout.numbers.element_size(),
        query_token=query.stride(0), query_head=query.stride(1),
        key_token=key.stride(0), key_head=key.stride(1),
        value_token=value.stride(0), value_head=value.stride(1),
        scale=scaling * math.log2(math.e),
        eps=0.0 if rotation is None else rotation.eps,
        offset=0.0 if rotation is None else rotation.offset,
        item_count=layout.items, counted=layout.counted, pitch=layout.tables.shape[1],
        kv_heads=kv_heads, group=heads // kv_heads, tile_rows=tile, dtype=DTYPES[query.dtype],
        warps=instance.warps, stages=instance.stages, per_processor=instance.per_processor,
        stream=torch.cuda.current_stream(query.device).cuda_stream,
    )  # fmt: skip
    with torch.cuda.device(query.device):
        loaded = usable()
        status = loaded.nf4_cuda_decode_attention(ctypes.byref(struct))
        raise_for(loaded, status, f"decode attention of {list(query.shape)}")
