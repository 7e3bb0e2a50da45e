"""One launch that attends for one new token of each sequence and writes its key and value into the paged cache."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from nf4_kernels.cuda.decode_attention import Workspace
from nf4_kernels.cuda.device import capability
from server.engine.runtime.attention.base import AttentionOptions, result_shape
from server.engine.runtime.attention.kernels.decode.sums import both, finish
from server.engine.runtime.attention.kernels.instances import DecodeInstance, Shared
from server.engine.runtime.attention.kernels.key_tiles import (
    LOG2_E,
    add_sinks,
    add_tile,
    cache_shape,
    load_tile,
    scores_of,
    store_kv,
)
from server.engine.runtime.attention.kernels.kv_cache import LayerCache, latent_value_dim
from server.engine.runtime.attention.kernels.step_keys import add_rows
from server.engine.runtime.attention.kernels.warp_tiles import (
    add_warp_tiles,
    half_queries,
    load_warp_tiles,
    no_sums,
    total,
)
from server.engine.runtime.attention.rotary import RotaryEmbedding

# Kernels read no global values of other types.
_WRITTEN, _IN_ROWS = tl.constexpr(int(Shared.WRITTEN)), tl.constexpr(int(Shared.IN_ROWS))


class Partials(Workspace):
    """Partial sums: what the parts of a sequence's keys leave until the thread block that ends last reduces them."""

    def __init__(self, items: int, kv_heads: int, heads: int, dim: int, device: torch.device) -> None:
        super().__init__(
            torch.empty(items * heads * dim, dtype=torch.float32, device=device),
            torch.empty(items * heads * 2, dtype=torch.float32, device=device),
            torch.zeros(items * kv_heads, dtype=torch.int32, device=device),
        )


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
    shared: Shared = Shared.NO,
) -> torch.Tensor:
    """Attention [T, heads, dim] of T sequences' newest tokens, tiled with tile; writes their keys and values.

    query [T, heads, dim], key and value [T, kv_heads, dim] in 16 bits, the cache's own where it has 16, any strides with a
    contiguous last dimension; numbers int32, decode.layout(): from first on lie the items, at most that many; their number
    is at counted. tables int32 [any, blocks of the longest], contiguous: the rows that items name. query and key are
    rotated by rotary first. sinks float32 [heads], see AttentionOptions. out: where the result goes, contiguous; a new
    tensor if None. shared: whether several of the tokens may be of one sequence, one after another; Shared.IN_ROWS is for
    caches in 16 bits, without rotary. In a cache of latents key [T, 1, dim] holds them, value is its first columns, as many
    as the result has, and rotary must be None.
    """
    tokens, heads, _ = query.shape
    groups = cache.groups(heads)
    if cache.is_latent:
        # Every group of query heads reads the same key.
        value = key[..., latent_value_dim(key.shape[2]) :]
        strides = [(rows.stride(0), 0) for rows in (key, value)]
    else:
        strides = [(rows.stride(0), rows.stride(1)) for rows in (key, value)]
    # Without a rotary embedding the kernel reads none of these tensors.
    turned = RotaryEmbedding(query, query) if rotary is None else rotary
    instance = _instance(cache, heads, counted, tables, options, rotary, tile, sinks, shared)
    if out is None:
        out = query.new_empty(result_shape(tokens, heads, instance.cache.dim, tile))
    _attend_newest[(items, groups)](
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
        *query.stride()[:2],
        *strides[0],
        *strides[1],
        options.scaling * LOG2_E,
        turned.cos,
        turned.sin,
        *(turned.norms or (query, query)),
        turned.eps,
        turned.offset,
        cache.data if cache.scales is None else cache.scales,
        query if sinks is None else sinks,
        instance,
        num_warps=instance.warps,
        maxnreg=instance.most_registers,
        launch_pdl=instance.overlap,
    )
    return out


def _instance(
    cache: LayerCache,
    heads: int,
    counted: int,
    tables: torch.Tensor,
    options: AttentionOptions,
    rotary: RotaryEmbedding | None,
    tile: int,
    sinks: torch.Tensor | None,
    shared: Shared,
) -> DecodeInstance:
    """Form that the kernel is compiled for, see attend_newest()."""
    return DecodeInstance(
        cache=cache_shape(cache.data, groups := cache.groups(heads)),
        group=heads // groups,
        counted=counted,
        pitch=tables.shape[1],
        cap=0.0 if options.softcap is None else options.softcap * LOG2_E,
        tile_rows=tile,
        has_sinks=sinks is not None,
        has_rotary=rotary is not None,
        norms=rotary is not None and rotary.norms is not None,
        overlap=capability(cache.data.device)[0] >= 9,
        shared=shared,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _attend_newest(  # type: ignore[no-untyped-def]
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
    instance: tl.constexpr,
):
    # A thread block takes a part of a sequence's keys and one key head, with all query heads that share it.
    if instance.overlap:  # docs/adr/0010-pdl-and-weight-prefetch.md
        tl.extra.cuda.gdc_launch_dependents()
    shape: tl.constexpr = instance.cache
    item, head = tl.program_id(0), tl.program_id(1)
    row, begin, end, newest = _four(items + item * 8)
    first, parts, blocks, before = _four(items + item * 8 + 4)
    if item >= tl.load(numbers + instance.counted):
        return
    # The newest key may not be in the cache yet, nor those of the same sequence that this step computes in front of it.
    step = newest
    if instance.shared == _IN_ROWS:
        step -= before
    old = tl.minimum(end, step)
    column, table = tl.arange(0, shape.dim), tables + blocks.to(tl.int64) * instance.pitch
    pages, own_scales = cache + head * shape.head_pitch, scales + head * shape.block_size
    # Earlier steps have written the older keys, so the first of them are loaded before the launch in front has ended. Where
    # that launch writes the step's keys, some of these may be among a token's older keys, so it has to end first.
    if instance.overlap and instance.shared == _WRITTEN:
        tl.extra.cuda.gdc_wait()
    tile = _first_tile(pages, own_scales, table, begin, old, instance)
    q_weights = _weights(query_norm, offset, shape.dim, instance.norms)
    k_weights = _weights(key_norm, offset, shape.dim, instance.norms)
    if instance.overlap and instance.shared != _WRITTEN:
        tl.extra.cuda.gdc_wait()
    line = tl.arange(0, instance.rows)
    real = line < instance.group
    queries = query + row.to(tl.int64) * query_token + (head * instance.group + line[:, None]) * query_head
    own_key = key + row.to(tl.int64) * key_token + head * key_head
    q = tl.load(queries + column[None, :], mask=real[:, None], other=0.0)
    k_new = tl.load(own_key + column)
    v_new = tl.load(value + row.to(tl.int64) * value_token + head * value_head + tl.arange(0, shape.second))
    q_rest = q
    if shape.rest != 0:
        q_rest = tl.load(queries + shape.dim + tl.arange(0, shape.rest)[None, :], mask=real[:, None], other=0.0)
    if instance.has_rotary:
        q_other = tl.load(queries + _swapped(shape.dim)[None, :], mask=real[:, None], other=0.0)
        k_other = tl.load(own_key + _swapped(shape.dim))[None, :]
        cos, sin = _angles(cosines, sines, row, shape.dim)
        # Everything is loaded before the first sum over threads, which the compiler moves no load across.
        q = _rotated(q, q_other, cos, sin, q_weights, eps, instance)
        k_new = tl.reshape(_rotated(k_new[None, :], k_other, cos, sin, k_weights, eps, instance), [shape.dim])
    last = end > newest
    if instance.shared != _WRITTEN:
        slot = tl.load(table + newest // shape.block_size).to(tl.int64) * shape.block_size + newest % shape.block_size
        store_kv(pages, own_scales, slot, k_new, v_new, last, shape)
    acc, best, weight = _first_sums(q, q_rest, k_new, v_new, last, scale, instance)
    acc, best, weight = _add_keys(
        (acc, best, weight), q, q_rest, tile, pages, own_scales, table, begin, old, scale, instance
    )
    if instance.shared == _IN_ROWS:
        # Behind the cache's keys, since in front of them they would take registers while these are loaded.
        rows = key + head * key_head, value + head * value_head, key_token, value_token, row - newest
        near = tl.minimum(end, newest)
        acc, best, weight = add_rows(
            (acc, best, weight), q, q_rest, rows, tl.maximum(begin, step), near, scale, instance
        )
    if instance.has_sinks:
        places = sinks + head * instance.group + line
        acc, best, weight = add_sinks(acc, best, weight, places, real & (item == first))
    finish(out, sums, weights, arrived, acc, best, weight, line, real, item, first, parts, row, head, instance)


@triton.jit  # type: ignore[untyped-decorator]
def _first_tile(pages, scales, table, begin, end, instance: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the first tile of the keys in front of end, see load_tile() and load_warp_tiles()."""
    shape: tl.constexpr = instance.cache
    step: tl.constexpr = instance.tile
    if instance.splits_tiles:
        return load_warp_tiles(pages, scales, table, begin, end, instance)
    else:
        return load_tile(pages, scales, table, begin, end, shape, step)


@triton.jit  # type: ignore[untyped-decorator]
def _add_keys(  # type: ignore[no-untyped-def]
    sums, q, q_rest, tile, pages, scales, table, begin, end, scale, instance: tl.constexpr
):
    """Add keys [begin, end) to the sums, greatest scores and sums of weights; tile: the first of them, loaded."""
    shape: tl.constexpr = instance.cache
    cap: tl.constexpr = instance.cap
    step: tl.constexpr = instance.tile
    k, v, k_scale, v_scale, inside = tile
    if instance.splits_tiles:
        q_even, q_odd, q_scale = half_queries(q, scale, instance)
        of_warps = no_sums(instance)
        of_warps = add_warp_tiles(of_warps, q_even, q_odd, k, v, k_scale, v_scale, inside, q_scale, instance)
        for start in tl.range(begin + step, end, step, num_stages=instance.stages):
            k, v, k_scale, v_scale, inside = load_warp_tiles(pages, scales, table, start, end, instance)
            of_warps = add_warp_tiles(of_warps, q_even, q_odd, k, v, k_scale, v_scale, inside, q_scale, instance)
        return both(sums, total(of_warps, instance))
    else:
        acc, best, weight = sums
        seen = inside[None, :]
        acc, best, weight = add_tile(acc, best, weight, q, q_rest, k, v, k_scale, v_scale, seen, scale, cap, shape)
        for start in tl.range(begin + step, end, step, num_stages=instance.stages):
            k, v, k_scale, v_scale, inside = load_tile(pages, scales, table, start, end, shape, step)
            seen = inside[None, :]
            acc, best, weight = add_tile(acc, best, weight, q, q_rest, k, v, k_scale, v_scale, seen, scale, cap, shape)
        return acc, best, weight


@triton.jit  # type: ignore[untyped-decorator]
def _first_sums(q, q_rest, k, v, wanted, scale, instance: tl.constexpr):  # type: ignore[no-untyped-def]
    """Start the sums, greatest scores and sums of weights: with the new key where that is wanted, else with no key."""
    rows: tl.constexpr = instance.rows
    dim: tl.constexpr = instance.cache.dim
    dots = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1)
    if instance.cache.rest != 0:
        dots += tl.sum(q_rest.to(tl.float32) * v.to(tl.float32)[None, :], 1)
        v = k
    own = scores_of(dots, scale, instance.cap)
    best = tl.where(wanted, own, -1e38)
    weight = tl.zeros([rows], tl.float32) + tl.where(wanted, 1.0, 0.0)
    acc = tl.zeros([rows, dim], tl.float32) + tl.where(wanted, v.to(tl.float32), 0.0)[None, :]
    return acc, best, weight


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
def _rotated(x, x_other, cos, sin, weights, eps, instance: tl.constexpr):  # type: ignore[no-untyped-def]
    """Heads x [any, dim] normalised and rotated, see rotary.py; x_other: with their halves swapped; weights: _weights()."""
    wide, swapped = x.to(tl.float32), x_other.to(tl.float32)
    result = wide * (weights[0] * cos)[None, :] + swapped * (weights[1] * sin)[None, :]
    if instance.norms:
        result *= tl.rsqrt(tl.sum(wide * wide, 1) / instance.cache.dim + eps)[:, None]
    return result.to(x.dtype)


@triton.jit
def _four(place):  # type: ignore[no-untyped-def]
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
