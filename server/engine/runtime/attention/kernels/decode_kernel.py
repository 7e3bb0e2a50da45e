"""One launch that attends for one new token of each sequence and writes its key and value into the paged cache."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from server.engine.runtime.attention.base import AttentionOptions, result_shape
from server.engine.runtime.attention.kernels.decode_sums import add_up, put_part, put_result, result_row
from server.engine.runtime.attention.kernels.key_tiles import (
    LOG2_E,
    add_sinks,
    add_tile,
    load_tile,
    quantization_limit,
    scores_of,
    store_kv,
)
from server.engine.runtime.attention.kernels.kv_cache import LayerCache
from server.engine.runtime.attention.rotary import RotaryEmbedding

# Keys of a tile; warps of a thread block; tiles that are being loaded at a time.
_TILE = 64
_WARPS = 4
_STAGES = 2
# In 8 bits a tile of 64 keys would take 220 registers, and a multiprocessor would hold two thread blocks.
_TILE_8_BITS, _STAGES_8_BITS = 32, 3


class Partials:
    """Partial sums: what the parts of a sequence's keys leave until the thread block that ends last reduces them."""

    def __init__(self, items: int, kv_heads: int, heads: int, dim: int, device: torch.device) -> None:
        self.sums = torch.empty(items * heads * dim, dtype=torch.float32, device=device)
        self.weights = torch.empty(items * heads * 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(items * kv_heads, dtype=torch.int32, device=device)


def attend_newest(
    cache: LayerCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    numbers: torch.Tensor,
    first: int,
    counted: int,
    items: int,
    tables: torch.Tensor,
    partials: Partials,
    options: AttentionOptions,
    rotary: RotaryEmbedding | None,
    tile: int = 0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    written: bool = False,
) -> torch.Tensor:
    """Attention [T, heads, dim] of T sequences' newest tokens, tiled with tile; writes their keys and values.

    query [T, heads, dim], key and value [T, kv_heads, dim] in 16 bits, the cache's own where it has 16, any strides with a
    contiguous last dimension; numbers int32, decode.layout(): from first on lie the items, at most that many; their number
    is at counted. tables int32 [any, blocks of the longest], contiguous: the rows that items name. query and key get rotary
    first. sinks float32 [heads], see AttentionOptions. out: where the result goes, contiguous; a new tensor if None.
    written: the launch in front has written the keys and values, so that several of the tokens may be of one sequence, one
    after another.
    """
    tokens, heads, dim = query.shape
    # Without a rotary embedding the kernel reads none of these tensors.
    turned = RotaryEmbedding(query, query) if rotary is None else rotary
    kv_heads, block_size = key.shape[1], cache.data.shape[2]
    if out is None:
        out = query.new_empty(result_shape(tokens, heads, dim, tile))
    overlap = torch.cuda.get_device_capability(query.device)[0] >= 9
    _attend[(items, kv_heads)](
        cache.data,
        query,
        key,
        value,
        out,
        numbers,
        numbers[first:],
        tables,
        partials.sums,
        partials.weights,
        partials.arrived,
        *(stride for rows in (query, key, value) for stride in rows.stride()[:2]),
        options.scaling * LOG2_E,
        turned.cos,
        turned.sin,
        *(turned.norms or (query, query)),
        turned.eps,
        turned.offset,
        cache.data if cache.scales is None else cache.scales,
        query if sinks is None else sinks,
        sinks is not None,
        rotary is not None,
        turned.norms is not None,
        counted,
        tables.shape[1],
        kv_heads,
        heads // kv_heads,
        max(16, triton.next_power_of_2(heads // kv_heads)),
        triton.next_power_of_2(heads // kv_heads),
        dim,
        block_size,
        0.0 if options.softcap is None else options.softcap * LOG2_E,
        _TILE if cache.scales is None else _TILE_8_BITS,
        _STAGES if cache.scales is None else _STAGES_8_BITS,
        tile,
        overlap,
        quantization_limit(cache.data.dtype),
        written,
        num_warps=_WARPS,
        launch_pdl=overlap,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]  # noqa: PLR0915
    cache,
    query,
    key,
    value,
    out,
    numbers,
    items,
    tables,
    sums,
    weights,
    arrived,
    query_token,
    query_head,
    key_token,
    key_head,
    value_token,
    value_head,
    scale,
    cosines,
    sines,
    query_norm,
    key_norm,
    eps,
    offset,
    scales,
    sinks,
    has_sinks: tl.constexpr,
    has_rotary: tl.constexpr,
    norms: tl.constexpr,
    counted: tl.constexpr,
    pitch: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    few: tl.constexpr,
    dim: tl.constexpr,
    block_size: tl.constexpr,
    cap: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    tile_rows: tl.constexpr,
    overlap: tl.constexpr,
    limit: tl.constexpr,
    written: tl.constexpr,
):
    # A thread block takes a part of a sequence's keys and one key head, with all query heads that share it.
    if overlap:  # see server/engine/runtime/compile/pdl.py
        tl.extra.cuda.gdc_launch_dependents()
    item, head = tl.program_id(0), tl.program_id(1)
    row, begin, end, newest = _four(items + item * 8)
    first, parts, blocks, _ = _four(items + item * 8 + 4)
    if item >= tl.load(numbers + counted):
        return
    # The newest key may not be in the cache yet.
    old = tl.minimum(end, newest)
    column, table = tl.arange(0, dim), tables + blocks.to(tl.int64) * pitch
    width: tl.constexpr = kv_heads * dim
    pages, own_scales = cache + head * dim, scales + head
    # Earlier steps have written the older keys, so the first of them are loaded before the launch in front has ended; but
    # where that one writes the step's keys, some of which are older than others.
    if overlap and written:
        tl.extra.cuda.gdc_wait()
    k, v, k_scale, v_scale, inside = load_tile(
        pages, own_scales, table, begin, old, width, kv_heads, dim, block_size, tile, limit
    )
    q_weight, q_weight_other = _weights(query_norm, offset, dim, norms)
    k_weight, k_weight_other = _weights(key_norm, offset, dim, norms)
    if overlap and not written:
        tl.extra.cuda.gdc_wait()
    line = tl.arange(0, rows)
    real = line < group
    queries = query + row.to(tl.int64) * query_token + (head * group + line[:, None]) * query_head
    own_key = key + row.to(tl.int64) * key_token + head * key_head
    q = tl.load(queries + column[None, :], mask=real[:, None], other=0.0)
    k_new = tl.load(own_key + column)
    v_new = tl.load(value + row.to(tl.int64) * value_token + head * value_head + column)
    if has_rotary:
        # Everything is loaded before the first sum over threads, which the compiler moves no load across.
        q_other = tl.load(queries + _swapped(dim)[None, :], mask=real[:, None], other=0.0)
        k_other = tl.load(own_key + _swapped(dim))[None, :]
        cos, sin = _angles(cosines, sines, row, dim)
        q = _rotated(q, q_other, cos, sin, q_weight, q_weight_other, eps, dim, norms)
        k_new = tl.reshape(
            _rotated(k_new[None, :], k_other, cos, sin, k_weight, k_weight_other, eps, dim, norms), [dim]
        )
    last = end > newest
    if not written:
        place = tl.load(table + newest // block_size).to(tl.int64) * 2 * block_size + newest % block_size
        store_kv(pages, own_scales, place, k_new, v_new, last, width, kv_heads, dim, block_size, limit)
    own = scores_of(tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1), scale, cap)
    best = tl.where(last, own, -1e38)
    weight = tl.zeros([rows], tl.float32) + tl.where(last, 1.0, 0.0)
    acc = tl.zeros([rows, dim], tl.float32) + tl.where(last, v_new.to(tl.float32), 0.0)[None, :]
    acc, best, weight = add_tile(acc, best, weight, q, k, v, k_scale, v_scale, inside[None, :], scale, cap, limit)
    for start in tl.range(begin + tile, old, tile, num_stages=stages):
        k, v, k_scale, v_scale, inside = load_tile(
            pages, own_scales, table, start, old, width, kv_heads, dim, block_size, tile, limit
        )
        acc, best, weight = add_tile(acc, best, weight, q, k, v, k_scale, v_scale, inside[None, :], scale, cap, limit)
    if has_sinks:
        acc, best, weight = add_sinks(acc, best, weight, sinks + head * group + line, real & (item == first))
    to_out = result_row(out, row, head, kv_heads, group, dim, tile_rows)
    if parts == 1:
        put_result(to_out, acc / weight[:, None], row, head, line, group, dim, tile_rows)
    else:
        put_part(sums, weights, (item * kv_heads + head) * group + line, acc, best, weight, real, dim)
        tl.debug_barrier()
        counter = arrived + first * kv_heads + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            tl.store(counter, 0)
            add_up(to_out, sums, weights, first, parts, row, head, kv_heads, group, few, dim, tile_rows)


@triton.jit  # type: ignore[untyped-decorator]
def _swapped(dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """A head's columns, its halves swapped."""
    return (tl.arange(0, dim) + dim // 2) % dim


@triton.jit  # type: ignore[untyped-decorator]
def _weights(place, offset, dim: tl.constexpr, norms: tl.constexpr):  # type: ignore[no-untyped-def]
    """A norm's weights, as they are and swapped; ones without norms. No launch writes the parameters."""
    if norms:
        straight = tl.load(place + tl.arange(0, dim)).to(tl.float32) + offset
        return straight, tl.load(place + _swapped(dim)).to(tl.float32) + offset
    else:
        return tl.full([dim], 1.0, tl.float32), tl.full([dim], 1.0, tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _angles(cosines, sines, row, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosines, and sines with the first half negated."""
    column = tl.arange(0, dim)
    cos = tl.load(cosines + row * dim + column).to(tl.float32)
    sin = tl.load(sines + row * dim + column).to(tl.float32)
    return cos, tl.where(column < dim // 2, -sin, sin)


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(  # type: ignore[no-untyped-def]
    x, x_other, cos, sin, weight, weight_other, eps, dim: tl.constexpr, norms: tl.constexpr
):
    """Heads x [any, dim] normalised and rotated, see rotary.py; x_other, weight_other: with their halves swapped."""
    wide, swapped = x.to(tl.float32), x_other.to(tl.float32)
    result = wide * (weight * cos)[None, :] + swapped * (weight_other * sin)[None, :]
    if norms:
        result *= tl.rsqrt(tl.sum(wide * wide, 1) / dim + eps)[:, None]
    return result.to(x.dtype)


@triton.jit
def _four(place):  # type: ignore[no-untyped-def]
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
