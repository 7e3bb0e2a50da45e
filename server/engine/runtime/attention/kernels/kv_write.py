"""One launch that puts a step's new keys and values of a layer into its paged cache."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from nf4_kernels.cuda.device import capability
from server.engine.runtime.attention.kernels.key_tiles import cache_shape, store_kv


def write_kv(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """cache[slot // block_size, 0 or 1, slot % block_size] = key or value, for each token.

    cache [blocks, 2, block_size, kv_heads, dim], as LayerCache.data; key and value [T, kv_heads, dim] of its dtype, any
    strides with a contiguous last dimension; slots int64 [T], on the same CUDA device. Where several tokens have the same
    slot, any of them may be the one that stays. Of latents value is not read.
    """
    tokens, heads, _ = key.shape
    shape = cache_shape(cache)
    if shape.rest:
        value = key[..., shape.dim :]
    _write[(tokens,)](
        cache,
        key,
        value,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        shape,
        triton.next_power_of_2(heads * shape.dim),
        overlap := capability(key.device)[0] >= 9,
        launch_pdl=overlap,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    cache,
    key,
    value,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    shape: tl.constexpr,
    width: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:  # docs/adr/0010-pdl-and-weight-prefetch.md
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # A thread block takes one token, with all its heads.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    place = tl.arange(0, width)
    inside = place < shape.kv_heads * shape.dim
    head, column = place // shape.dim, place % shape.dim
    block, offset = slot // shape.block_size, slot % shape.block_size
    target = cache + block * shape.block_pitch + offset * shape.token_pitch + head * shape.head_pitch + column
    second = inside & (column < shape.second)
    new_key = tl.load(key + token * key_token + head * key_head + column, mask=inside)
    new_value = tl.load(value + token * value_token + head * value_head + column, mask=second)
    tl.store(target, new_key, mask=inside)
    tl.store(target + shape.second_pitch, new_value, mask=second)


def quantize_kv(
    cache: torch.Tensor, scales: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Do as write_kv() does, with the data of a kv_cache.LayerCache in 8 bits (int8 or float8_e4m3fn) and its scales."""
    tokens, heads, _ = key.shape
    overlap = capability(key.device)[0] >= 9
    _quantize[(tokens, heads)](
        cache,
        scales,
        key,
        value,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        cache_shape(cache),
        overlap,
        num_warps=1,
        launch_pdl=overlap,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(  # type: ignore[no-untyped-def]
    cache,
    scales,
    key,
    value,
    slots,
    key_token,
    key_head,
    value_token,
    value_head,
    shape: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:  # docs/adr/0010-pdl-and-weight-prefetch.md
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # A thread block takes one key head of one token.
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    column = tl.arange(0, shape.dim)
    k = tl.load(key + token * key_token + head * key_head + column)
    v = tl.load(value + token * value_token + head * value_head + column)
    store_kv(cache + head * shape.head_pitch, scales + head * shape.block_size, slot, k, v, True, shape)
