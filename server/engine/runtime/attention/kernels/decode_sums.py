"""The reduction of a sequence's parts and the stores of results, in the launch that attends."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator]
def put_part(sums, weights, place, acc, best, weight, real, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a part's partial sums for its query heads at place."""
    tl.store(sums + place[:, None] * dim + tl.arange(0, dim)[None, :], acc, mask=real[:, None])
    tl.store(weights + place * 2, best, mask=real)
    tl.store(weights + place * 2 + 1, weight, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def add_up(  # type: ignore[no-untyped-def]
    out,
    sums,
    weights,
    first,
    parts,
    row,
    head,
    instance: tl.constexpr,
):
    """Reduce the partial sums of all parts of a sequence's keys, in their order."""
    group: tl.constexpr = instance.group
    dim: tl.constexpr = instance.cache.dim
    line = tl.arange(0, instance.few)
    place = (first * instance.cache.kv_heads + head) * group + line
    sums += place[:, None] * dim + tl.arange(0, dim)[None, :]
    weights += place * 2
    real = line < group
    step: tl.constexpr = instance.cache.kv_heads * group
    acc, best, weight = _part(sums, weights, 0, 0, real, step, dim)
    for part in tl.range(0, parts, instance.reduced):
        # All loads of a turn are in flight at once.
        loaded = _eight_parts(sums, weights, part, parts, real, step, dim)
        if instance.reduced == 16:
            more = _eight_parts(sums, weights, part + 8, parts, real, step, dim)
            acc, best, weight = both((acc, best, weight), both(_eight_as_one(loaded), _eight_as_one(more)))
        else:
            acc, best, weight = both((acc, best, weight), _eight_as_one(loaded))
    put_result(out, acc / tl.where(real, weight, 1.0)[:, None], row, head, line, group, dim, instance.tile_rows)


@triton.jit  # type: ignore[untyped-decorator]
def finish(  # type: ignore[no-untyped-def]
    out,
    sums,
    weights,
    arrived,
    acc,
    best,
    weight,
    line,
    real,
    item,
    first,
    parts,
    row,
    head,
    instance: tl.constexpr,
):
    """Write a sequence's result; of a sequence in parts leave this part's sums, which the last part to end reduces."""
    kv_heads: tl.constexpr = instance.cache.kv_heads
    group: tl.constexpr = instance.group
    dim: tl.constexpr = instance.cache.dim
    to_out = result_row(out, row, head, kv_heads, group, dim, instance.tile_rows)
    if parts == 1:
        put_result(to_out, acc / weight[:, None], row, head, line, group, dim, instance.tile_rows)
    else:
        put_part(sums, weights, (item * kv_heads + head) * group + line, acc, best, weight, real, dim)
        tl.debug_barrier()
        counter = arrived + first * kv_heads + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            tl.store(counter, 0)
            add_up(to_out, sums, weights, first, parts, row, head, instance)


@triton.jit  # type: ignore[untyped-decorator]
def result_row(  # type: ignore[no-untyped-def]
    out, row, head, kv_heads: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, tile_rows: tl.constexpr
):
    """Where put_result() starts from, for a token's query heads that share a key head."""
    if tile_rows == 0:
        return out + (row.to(tl.int64) * kv_heads + head) * group * dim
    else:
        return out + (row // tile_rows).to(tl.int64) * (tile_rows * kv_heads * group * dim) + row % tile_rows * 64


@triton.jit  # type: ignore[untyped-decorator]
def put_result(  # type: ignore[no-untyped-def]
    out, result, row, head, line, group: tl.constexpr, dim: tl.constexpr, tile_rows: tl.constexpr
):
    """Store result [len(line), dim] of those heads, tiled (reference.tile_activations) where tile_rows is not 0."""
    result, column = result.to(out.dtype.element_ty), tl.arange(0, dim)[None, :]
    if tile_rows == 0:
        place = out + line[:, None] * dim + column
    else:
        k = (head * group + line[:, None]) * dim + column
        word = k % 64 // 2
        chunk = word % 8 ^ row % tile_rows % 8
        offset = k // 64 * (tile_rows * 64) + (chunk * 4 + word // 8) * 2 + k % 2
        # A word is two columns, which the compiler would otherwise store one by one.
        place = out + tl.max_contiguous(tl.multiple_of(offset, [1, 2]), [1, 2])
    tl.store(place, result, mask=(line < group)[:, None])


@triton.jit
def both(a, b):  # type: ignore[no-untyped-def]
    """Two parts of the same keys' weighted sums, greatest scores and sums of weights as one."""
    best = tl.maximum(a[1], b[1])
    of_a, of_b = tl.exp2(a[1] - best), tl.exp2(b[1] - best)
    return a[0] * of_a[:, None] + b[0] * of_b[:, None], best, a[2] * of_a + b[2] * of_b


@triton.jit  # type: ignore[untyped-decorator]
def _part(sums, weights, part, parts, real, step: tl.constexpr, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part's partial sums; zeros beyond the last part."""
    real = real & (part < parts)
    acc = tl.load(sums + part * step * dim, mask=real[:, None], other=0.0, cache_modifier=".cg")
    best = tl.load(weights + part * step * 2, mask=real, other=-1e38, cache_modifier=".cg")
    weight = tl.load(weights + part * step * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
    return acc, best, weight


@triton.jit  # type: ignore[untyped-decorator]
def _eight_parts(sums, weights, part, parts, real, step: tl.constexpr, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """The partial sums of eight parts that follow one another."""
    return (
        _part(sums, weights, part, parts, real, step, dim),
        _part(sums, weights, part + 1, parts, real, step, dim),
        _part(sums, weights, part + 2, parts, real, step, dim),
        _part(sums, weights, part + 3, parts, real, step, dim),
        _part(sums, weights, part + 4, parts, real, step, dim),
        _part(sums, weights, part + 5, parts, real, step, dim),
        _part(sums, weights, part + 6, parts, real, step, dim),
        _part(sums, weights, part + 7, parts, real, step, dim),
    )


@triton.jit
def _eight_as_one(eight):  # type: ignore[no-untyped-def]
    """What _eight_parts() has loaded, reduced."""
    first = both(both(eight[0], eight[1]), both(eight[2], eight[3]))
    return both(first, both(both(eight[4], eight[5]), both(eight[6], eight[7])))
