"""One launch that attends for one new token of each sequence and writes its key and value into the paged cache."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from server.engine.runtime.attention.base import AttentionOptions, result_shape
from server.engine.runtime.attention.decode_sums import add_up, put_part, put_result, result_row, with_sinks
from server.engine.runtime.attention.rotary import RotaryEmbedding

# Keys of a tile; warps of a thread block; tiles that are being loaded at a time.
_TILE = 64
_WARPS = 4
_STAGES = 2


class Partials:
    """Partial sums: what the parts of a sequence's keys leave until the thread block that ends last reduces them."""

    def __init__(self, items: int, kv_heads: int, heads: int, dim: int, device: torch.device) -> None:
        self.sums = torch.empty(items * heads * dim, dtype=torch.float32, device=device)
        self.weights = torch.empty(items * heads * 2, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(items * kv_heads, dtype=torch.int32, device=device)


def attend_newest(
    cache: torch.Tensor,
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
) -> torch.Tensor:
    """Attention [T, heads, dim] of T sequences' newest tokens, tiled with tile; writes their keys and values.

    cache [blocks, 2, block_size, kv_heads, dim], contiguous; query [T, heads, dim], key and value [T, kv_heads, dim] of
    its dtype, any strides with a contiguous last dimension; numbers int32, decode.layout(): from first on lie the items,
    at most that many; their number is at counted. tables int32 [any, blocks of the longest], contiguous: the rows that
    items name. query and key get rotary first. sinks float32 [heads], see AttentionOptions.
    """
    tokens, heads, dim = query.shape
    # Without a rotary embedding the kernel reads none of these tensors.
    turned = RotaryEmbedding(query, query) if rotary is None else rotary
    kv_heads, block_size = key.shape[1], cache.shape[2]
    out = query.new_empty(result_shape(tokens, heads, dim, tile))
    overlap = torch.cuda.get_device_capability(query.device)[0] >= 9
    _attend[(items, kv_heads)](
        cache,
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
        options.scaling * _LOG2_E,
        turned.cos,
        turned.sin,
        *(turned.norms or (query, query)),
        turned.eps,
        turned.offset,
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
        0.0 if options.softcap is None else options.softcap * _LOG2_E,
        _TILE,
        _STAGES,
        tile,
        overlap,
        num_warps=_WARPS,
        launch_pdl=overlap,
    )
    return out


_LOG2_E = 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
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
    column = tl.arange(0, dim)
    width: tl.constexpr = kv_heads * dim
    pages = cache + head * dim
    table = tables + blocks.to(tl.int64) * pitch
    # Earlier steps have written the older keys, so the first of them are loaded before the launch in front has ended.
    k, v, inside = _tile(pages, table, begin, old, width, dim, block_size, tile)
    q_weight, q_weight_other = _weights(query_norm, offset, dim, norms)
    k_weight, k_weight_other = _weights(key_norm, offset, dim, norms)
    if overlap:
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
    _put(pages, table, newest, k_new, v_new, last, width, dim, block_size)
    own = _scores(tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1), scale, cap)
    best = tl.where(last, own, -1e38)
    weight = tl.zeros([rows], tl.float32) + tl.where(last, 1.0, 0.0)
    acc = tl.zeros([rows, dim], tl.float32) + tl.where(last, v_new.to(tl.float32), 0.0)[None, :]
    acc, best, weight = _taken(acc, best, weight, q, k, v, inside, scale, cap)
    for start in tl.range(begin + tile, old, tile, num_stages=stages):
        k, v, inside = _tile(pages, table, start, old, width, dim, block_size, tile)
        acc, best, weight = _taken(acc, best, weight, q, k, v, inside, scale, cap)
    if has_sinks:
        acc, best, weight = with_sinks(acc, best, weight, sinks + head * group, line, real, item == first)
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
def _tile(  # type: ignore[no-untyped-def]
    pages,
    table,
    begin,
    end,
    width: tl.constexpr,
    dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
):
    """Keys and values from begin on, zeros from end on, and which of them are in front of end."""
    at = begin + tl.arange(0, tile)
    inside = at < end
    block = tl.load(table + at // block_size, mask=inside, other=0).to(tl.int64)
    place = pages + ((block * 2 * block_size + at % block_size) * width)[:, None] + tl.arange(0, dim)[None, :]
    k = tl.load(place, mask=inside[:, None], other=0.0)
    v = tl.load(place + block_size * width, mask=inside[:, None], other=0.0)
    return k, v, inside


@triton.jit  # type: ignore[untyped-decorator]
def _put(  # type: ignore[no-untyped-def]
    pages, table, newest, k, v, wanted, width: tl.constexpr, dim: tl.constexpr, block_size: tl.constexpr
):
    """Write the newest key and value into the cache if wanted."""
    column = tl.arange(0, dim)
    block = tl.load(table + newest // block_size).to(tl.int64)
    place = pages + (block * 2 * block_size + newest % block_size) * width + column
    tl.store(place, k, mask=(column < dim) & wanted)
    tl.store(place + block_size * width, v, mask=(column < dim) & wanted)


@triton.jit  # type: ignore[untyped-decorator]
def _taken(acc, best, weight, q, k, v, inside, scale, cap: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weighted sums, greatest scores and sums of weights with a tile of keys added."""
    scores = _scores(tl.dot(q, tl.trans(k)), scale, cap)
    scores = tl.where(inside[None, :], scores, -float("inf"))
    higher = tl.maximum(tl.maximum(best, tl.max(scores, 1)), -1e38)
    shrink = tl.exp2(best - higher)
    p = tl.exp2(scores - higher[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, higher, weight * shrink + tl.sum(p, 1)


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


@triton.jit  # type: ignore[untyped-decorator]
def _scores(dots, scale, cap: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores times log2(e), with a soft cap where cap, the cap times log2(e), is not 0."""
    scores = dots * scale
    if cap != 0:
        # tanh
        scores = cap - 2 * cap / (tl.exp2(2 * 1.4426950408889634 / cap * scores) + 1)
    return scores
