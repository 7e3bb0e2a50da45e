"""Attention for chunks of sequences whose keys and values are in the paged cache already, and the sum over parts of keys."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from nf4_kernels.cuda.device import arch, capability
from nf4_kernels.plan import shared_bytes
from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.kernels.chunk_items import FIELDS
from server.engine.runtime.attention.kernels.decode.key_parts import Room
from server.engine.runtime.attention.kernels.decode.sums import both, put_part
from server.engine.runtime.attention.kernels.key_tiles import LOG2_E, add_sinks, add_tile, cache_shape, load_tile
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache

_WARPS = 8
# Query rows that a thread block reduces.
_REDUCED_ROWS = 32


@dataclass(frozen=True)
class _Tiles:
    """What a thread block has in shared memory and registers at a time."""

    rows: int
    """Query rows: tokens times the query heads of a group."""
    keys: int
    stages: int


# By the elements of the longest head that has them. Latents are longer.
_TILES = {256: _Tiles(128, 64, 2), 512: _Tiles(64, 32, 2)}
_LATENT_TILES = _Tiles(64, 64, 2)
# If a thread block may have 99 KB only. Those of 256 were the fastest of those that fit, on an H200 that posed as sm_86:
# 1300 us if the others took 1089.
_SMALL_TILES = {255: _TILES[256], 256: _Tiles(64, 64, 1), 512: _Tiles(32, 16, 2)}
_SMALL_LATENT_TILES = _Tiles(32, 32, 2)
_SMALL_BYTES = 99 << 10


def _tiles(is_latent: bool, dim: int, device: torch.device) -> _Tiles:
    is_small = shared_bytes(arch(device)) <= _SMALL_BYTES
    if is_latent:
        return _SMALL_LATENT_TILES if is_small else _LATENT_TILES
    return next(own for longest, own in (_SMALL_TILES if is_small else _TILES).items() if dim <= longest)


def tokens_per_item(kind: Kind, device: torch.device) -> int:
    """Tokens that a thread block takes. Raises ValueError where a group of query heads has more than it has rows."""
    group, rows = kind.heads // kind.groups, _tiles(kind.is_latent, kind.dim, device).rows
    if group > rows:
        raise ValueError(f"{group} query heads share a key head, and the kernel has {rows} rows")
    return rows // group


class PartialSums:
    """What items leave that have a part of their tokens' keys, for room.wave + room.spare items of a step at most."""

    def __init__(self, room: Room, kinds: Collection[Kind], device: torch.device) -> None:
        self.room, self.items = room, room.wave + room.spare
        rows = {kind: kind.groups * _tiles(kind.is_latent, kind.dim, device).rows for kind in kinds}
        elements = max(count * kind.value_dim for kind, count in rows.items())
        self.sums = torch.empty(self.items * elements, dtype=torch.float32, device=device)
        self.weights = torch.empty(self.items * max(rows.values()) * 2, dtype=torch.float32, device=device)


def attend_chunks(
    cache: LayerCache,
    query: torch.Tensor,
    out: torch.Tensor,
    numbers: torch.Tensor,
    items: int,
    tables: torch.Tensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
    partial: PartialSums | None = None,
) -> None:
    """Write the attention of chunks' tokens into their rows of out [T, heads, value_dim], contiguous.

    query [T, heads, key_dim] of 16 bits, any strides with a contiguous last dimension. numbers int32, chunk_items.layout():
    how many items there are, at most that many, and the items. tables int32 [any, blocks of the longest], contiguous: the
    rows that items name. sinks float32 [heads], see AttentionOptions. partial: needed if items may have parts of keys.
    """
    heads = query.shape[1]
    groups, tiles = cache.groups(heads), _tiles(cache.is_latent, query.shape[-1], query.device)
    overlap = capability(query.device)[0] >= 9
    # Without parts the kernel reads none of these tensors.
    sums, weights = (query, query) if partial is None else (partial.sums, partial.weights)
    shape = cache_shape(cache.data, groups)
    _attend[(items, groups)](
        cache.data,
        cache.data if cache.scales is None else cache.scales,
        query,
        out,
        numbers,
        tables,
        *query.stride()[:2],
        options.scaling * LOG2_E,
        tables.shape[1],
        sums,
        weights,
        query if sinks is None else sinks,
        sinks is not None,
        options.window or 0,
        heads // groups,
        shape,
        0.0 if options.softcap is None else options.softcap * LOG2_E,
        tiles.rows,
        tiles.keys,
        tiles.stages,
        FIELDS,
        overlap,
        num_warps=_WARPS,
        launch_pdl=overlap,
    )
    if partial is not None:
        grid = min(items, partial.items), groups, tiles.rows // _REDUCED_ROWS
        own = heads // groups, shape, tiles.rows, _REDUCED_ROWS, FIELDS, overlap
        _reduce[grid](sums, weights, out, numbers, *own, launch_pdl=overlap)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    cache,
    scales,
    query,
    out,
    numbers,
    tables,
    query_token,
    query_head,
    scale,
    pitch,
    sums,
    weights,
    sinks,
    has_sinks: tl.constexpr,
    window: tl.constexpr,
    group: tl.constexpr,
    shape: tl.constexpr,
    cap: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    fields: tl.constexpr,
    overlap: tl.constexpr,
):
    # A thread block takes some tokens of a chunk, a part of their keys and one key head, with all query heads that share it.
    if overlap:  # docs/adr/0010-pdl-and-weight-prefetch.md
        tl.extra.cuda.gdc_launch_dependents()
    dim: tl.constexpr = shape.dim
    item, head = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(numbers):
        return
    own = numbers + fields + item * fields
    row, count, start, blocks = tl.load(own), tl.load(own + 1), tl.load(own + 2), tl.load(own + 3)
    opening, end, parts = tl.load(own + 4), tl.load(own + 5), tl.load(own + 6)
    table = tables + blocks.to(tl.int64) * pitch
    column, line, second = tl.arange(0, dim), tl.arange(0, rows), tl.arange(0, shape.second)
    token, sharer = line // group, line % group
    real = token < count
    if overlap:
        tl.extra.cuda.gdc_wait()
    queries = query + (row + token).to(tl.int64) * query_token + (head * group + sharer) * query_head
    q = tl.load(queries[:, None] + column[None, :], mask=real[:, None], other=0.0)
    q_rest = q
    if shape.rest != 0:
        q_rest = tl.load(queries[:, None] + dim + second[None, :], mask=real[:, None], other=0.0)
    newest = start + token
    pages, own_scales = cache + head * shape.head_pitch, scales + head * shape.block_size
    acc = tl.zeros([rows, dim], tl.float32)
    best = tl.full([rows], -1e38, tl.float32)
    weight = tl.zeros([rows], tl.float32)
    first = opening
    if window != 0:
        first = tl.maximum(opening, tl.maximum(0, start + 1 - window) // tile * tile)
    # All queries see all keys in front of the first query's own, unless there is a window. So these tiles need no mask.
    whole = tl.minimum(start + 1, end) // tile * tile
    if window == 0:
        for begin in tl.range(first, whole, tile, num_stages=stages):
            k, v, k_scale, v_scale, inside = load_tile(pages, own_scales, table, begin, end, shape, tile)
            seen = inside[None, :]
            acc, best, weight = add_tile(acc, best, weight, q, q_rest, k, v, k_scale, v_scale, seen, scale, cap, shape)
        first = tl.maximum(first, whole)
    for begin in tl.range(first, end, tile, num_stages=stages):
        k, v, k_scale, v_scale, inside = load_tile(pages, own_scales, table, begin, end, shape, tile)
        at = begin + tl.arange(0, tile)
        seen = inside[None, :] & (at[None, :] <= newest[:, None])
        if window != 0:
            seen = seen & (at[None, :] > newest[:, None] - window)
        acc, best, weight = add_tile(acc, best, weight, q, q_rest, k, v, k_scale, v_scale, seen, scale, cap, shape)
    if has_sinks:
        acc, best, weight = add_sinks(acc, best, weight, sinks + head * group + sharer, real & (opening == 0))
    if parts > 1:
        put_part(sums, weights, (item * shape.kv_heads + head) * rows + line, acc, best, weight, real, dim)
    else:
        _put(out, acc, weight, row, token, sharer, head, real, group, shape)


@triton.jit  # type: ignore[untyped-decorator]
def _put(  # type: ignore[no-untyped-def]
    out, acc, weight, row, token, sharer, head, real, group: tl.constexpr, shape: tl.constexpr
):
    """Write the attention of an item's tokens, from the sums over all of their keys."""
    place = out + ((row + token).to(tl.int64) * (shape.kv_heads * group) + head * group + sharer) * shape.dim
    result = (acc / tl.where(real, weight, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(place[:, None] + tl.arange(0, shape.dim)[None, :], result, mask=real[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _reduce(  # type: ignore[no-untyped-def]
    sums,
    weights,
    out,
    numbers,
    group: tl.constexpr,
    shape: tl.constexpr,
    rows: tl.constexpr,
    own_rows: tl.constexpr,
    fields: tl.constexpr,
    overlap: tl.constexpr,
):
    # A thread block adds up the parts of some query rows of an item's tokens, where the item is the first of these parts.
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dim: tl.constexpr = shape.dim
    item, head = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(numbers):
        return
    own = numbers + fields + item * fields
    row, count, opening, parts = tl.load(own), tl.load(own + 1), tl.load(own + 4), tl.load(own + 6)
    line = tl.program_id(2) * own_rows + tl.arange(0, own_rows)
    if (opening != 0) | (parts == 1) | (tl.program_id(2) * own_rows >= count * group):
        return
    token, sharer, column = line // group, line % group, tl.arange(0, dim)
    real = token < count
    acc = tl.zeros([own_rows, dim], tl.float32)
    best = tl.full([own_rows], -1e38, tl.float32)
    weight = tl.zeros([own_rows], tl.float32)
    for part in tl.range(0, parts):
        place = ((item + part) * shape.kv_heads + head) * rows + line
        own_acc = tl.load(sums + place[:, None] * dim + column[None, :], mask=real[:, None], other=0.0)
        own_best = tl.load(weights + place * 2, mask=real, other=-1e38)
        own_weight = tl.load(weights + place * 2 + 1, mask=real, other=0.0)
        acc, best, weight = both((acc, best, weight), (own_acc, own_best, own_weight))
    _put(out, acc, weight, row, token, sharer, head, real, group, shape)
