"""Common parts of the Triton attention kernels: tiles of keys and values from the paged cache, and their part of a softmax.

A cache in 8 bits has a float32 scale for each token and key head, of the key and of the value. Scores are multiplied by the
keys' scales, and probabilities by the values', so that the tiles enter the matrix multiplications as they are.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from server.engine.runtime.attention.kernels.instances import CacheShape
from server.engine.runtime.attention.kernels.kv_cache import latent_value_dim

LOG2_E = 1.4426950408889634


def quantization_limit(dtype: torch.dtype) -> float:
    """The magnitude that the largest element of a head has in a cache of this dtype, times its scale; 0 for 16 bits."""
    return {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}.get(dtype, 0.0)


def cache_shape(data: torch.Tensor, groups: int = 1) -> CacheShape:
    """The sizes of a layer's cache, LayerCache.data. groups: of query heads, if it holds latents."""
    _, parts, block_size, kv_heads, dim = data.shape
    if parts == 1:
        first = latent_value_dim(dim)
        return CacheShape(groups, first, block_size, 0.0, rest=dim - first)
    heads_first = data.stride(3) > data.stride(2)
    return CacheShape(kv_heads, dim, block_size, quantization_limit(data.dtype), heads_first)


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(  # type: ignore[no-untyped-def]
    pages,
    scales,
    table,
    begin,
    end,
    shape: tl.constexpr,
    tile: tl.constexpr,
):
    """Load keys and values from begin on, zeros from end on; their scales; and which of them are in front of end.

    pages, scales: the cache's data and scales, at the head. shape: a CacheShape. Of latents the first columns are in the
    place of keys, and the others in that of values.
    """
    block_size: tl.constexpr = shape.block_size
    at = begin + tl.arange(0, tile)
    inside = at < end
    block = tl.load(table + at // block_size, mask=inside, other=0).to(tl.int64)
    data = pages + (block * shape.block_pitch + at % block_size * shape.token_pitch)[:, None]
    k = tl.load(data + tl.arange(0, shape.dim)[None, :], mask=inside[:, None], other=0.0)
    v = tl.load(data + shape.second_pitch + tl.arange(0, shape.second)[None, :], mask=inside[:, None], other=0.0)
    if shape.limit == 0:
        return k, v, 1.0, 1.0, inside
    else:
        own = scales + block * (2 * block_size * shape.kv_heads) + at % block_size
        k_scale = tl.load(own, mask=inside, other=0.0)
        v_scale = tl.load(own + block_size * shape.kv_heads, mask=inside, other=0.0)
        return k, v, k_scale, v_scale, inside


@triton.jit  # type: ignore[untyped-decorator]
def add_tile(  # type: ignore[no-untyped-def]
    acc, best, weight, q, q_rest, k, v, k_scale, v_scale, inside, scale, cap: tl.constexpr, shape: tl.constexpr
):
    """Add a tile of keys to the sums, greatest scores and sums of weights; inside: which of the keys each query sees.

    q_rest: columns of queries that meet the rest of latents. k, v: as load_tile() gives them.
    """
    if shape.rest != 0:
        scores = scores_of(tl.dot(q, tl.trans(k), tl.dot(q_rest, tl.trans(v))), scale, cap)
    elif shape.limit == 0:
        scores = scores_of(tl.dot(q, tl.trans(k)), scale, cap)
    else:
        scores = scores_of(tl.dot(q, tl.trans(_widened(k, q.dtype))) * k_scale[None, :], scale, cap)
    scores = tl.where(inside, scores, -float("inf"))
    higher = tl.maximum(tl.maximum(best, tl.max(scores, 1)), -1e38)
    shrink = tl.exp2(best - higher)
    p = tl.exp2(scores - higher[:, None])
    if shape.rest != 0:
        acc = tl.dot(p.to(k.dtype), k, acc * shrink[:, None])
    elif shape.limit == 0:
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    else:
        acc = tl.dot((p * v_scale[None, :]).to(q.dtype), _widened(v, q.dtype), acc * shrink[:, None])
    return acc, higher, weight * shrink + tl.sum(p, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _widened(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """x of 8 bits in dtype."""
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        # float16 to bfloat16 is an instruction of Hopper's only, and runs at 16 a clock there.
        x = x.to(tl.float16).to(tl.float32)
    return x.to(dtype)


@triton.jit
def add_sinks(acc, best, weight, places, wanted):  # type: ignore[no-untyped-def]
    """Sums with each row's sink added where wanted, see AttentionOptions. No launch writes the parameters."""
    sink = tl.load(places, mask=wanted, other=-float("inf")) * 1.4426950408889634
    higher = tl.maximum(best, sink)
    shrink = tl.exp2(best - higher)
    return acc * shrink[:, None], higher, weight * shrink + tl.exp2(sink - higher)


@triton.jit  # type: ignore[untyped-decorator]
def scores_of(dots, scale, cap: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores times log2(e), with a soft cap unless cap, which is the soft cap times log2(e), is 0."""
    scores = dots * scale
    if cap != 0:
        # tanh
        scores = cap - 2 * cap / (tl.exp2(2 * 1.4426950408889634 / cap * scores) + 1)
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def store_kv(  # type: ignore[no-untyped-def]
    pages,
    scales,
    slot,
    k,
    v,
    wanted,
    shape: tl.constexpr,
):
    """Write a token's key and value of one head, or both parts of its latent, into the cache at its slot if wanted.

    k: [dim]. v: [second]. shape: a CacheShape.
    """
    column, second = tl.arange(0, shape.dim), tl.arange(0, shape.second)
    own = pages + slot // shape.block_size * shape.block_pitch + slot % shape.block_size * shape.token_pitch
    inside, second_inside = (column < shape.dim) & wanted, (second < shape.second) & wanted
    if shape.limit == 0:
        tl.store(own + column, k, mask=inside)
        tl.store(own + shape.second_pitch + second, v, mask=second_inside)
    else:
        k, k_scale = _quantized(k, pages.dtype.element_ty, shape.limit)
        v, v_scale = _quantized(v, pages.dtype.element_ty, shape.limit)
        tl.store(own + column, k, mask=inside)
        tl.store(own + shape.second_pitch + second, v, mask=second_inside)
        block: tl.constexpr = shape.block_size * shape.kv_heads
        own_scales = scales + slot // shape.block_size * (2 * block) + slot % shape.block_size
        tl.store(own_scales, k_scale, mask=wanted)
        tl.store(own_scales + block, v_scale, mask=wanted)


@triton.jit  # type: ignore[untyped-decorator]
def _quantized(x, dtype: tl.constexpr, limit: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [dim] in 8 bits, and its scale: the largest element has the magnitude limit."""
    wide = x.to(tl.float32)
    # The bound keeps the inverse finite where a head is all zeros.
    largest = tl.maximum(tl.max(tl.abs(wide), 0), 1e-30)
    scaled = wide * (limit / largest)
    if dtype == tl.int8:
        scaled = tl.floor(scaled + 0.5)
    return scaled.to(dtype), largest / limit
