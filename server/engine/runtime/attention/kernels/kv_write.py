"""One launch that puts a step's new keys and values of a layer into its paged cache."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from server.engine.runtime.attention.kernels.instances import CacheShape
from server.engine.runtime.attention.kernels.key_tiles import quantization_limit, store_kv


def write_kv(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """cache[slot // block_size, 0 or 1, slot % block_size] = key or value, for each token.

    cache [blocks, 2, block_size, kv_heads, dim], contiguous; key and value [T, kv_heads, dim] of its dtype, any strides
    with a contiguous last dimension; slots int64 [T], on the same CUDA device. Where several tokens have
    the same slot, any of them may be the one that stays.
    """
    tokens, heads, dim = key.shape
    block_size = cache.shape[2]
    _write[(tokens,)](
        cache,
        key,
        value,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        block_size,
        dim,
        heads * dim,
        triton.next_power_of_2(heads * dim),
        overlap := torch.cuda.get_device_capability(key.device)[0] >= 9,
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
    block_size: tl.constexpr,
    dim: tl.constexpr,
    row: tl.constexpr,
    width: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:  # see server/engine/runtime/compile/pdl.py
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # A thread block takes one token; its key and its value, all heads, are one row of the cache each.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    place = tl.arange(0, width)
    inside = place < row
    head, column = place // dim, place % dim
    target = cache + (slot + slot // block_size * block_size) * row + place
    new_key = tl.load(key + token * key_token + head * key_head + column, mask=inside)
    new_value = tl.load(value + token * value_token + head * value_head + column, mask=inside)
    tl.store(target, new_key, mask=inside)
    tl.store(target + block_size * row, new_value, mask=inside)


def quantize_kv(
    cache: torch.Tensor, scales: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Do as write_kv() does, with the data of a kv_cache.LayerCache in 8 bits (int8 or float8_e4m3fn) and its scales."""
    tokens, heads, dim = key.shape
    overlap = torch.cuda.get_device_capability(key.device)[0] >= 9
    _quantize[(tokens, heads)](
        cache,
        scales,
        key,
        value,
        slots,
        *key.stride()[:2],
        *value.stride()[:2],
        CacheShape(heads, dim, cache.shape[2], quantization_limit(cache.dtype)),
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
    if overlap:  # see server/engine/runtime/compile/pdl.py
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # A thread block takes one key head of one token.
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    column = tl.arange(0, shape.dim)
    k = tl.load(key + token * key_token + head * key_head + column)
    v = tl.load(value + token * value_token + head * value_head + column)
    place = slot + slot // shape.block_size * shape.block_size
    store_kv(cache + head * shape.dim, scales + head * shape.block_size, place, k, v, True, shape)
