"""The reduction of a sequence's parts and the stores of results, in the launch that attends."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator]
def put_part(sums, weights, place, acc, best, weight, real, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a part's partial sums for its query heads at place."""
    tl.store(sums + place[:, None] * dim + tl.arange(0, dim)[None, :], acc, mask=real[:, None])
    _put_weights(weights, place, best, weight, real)


@triton.jit
def _put_weights(weights, place, best, weight, real):  # type: ignore[no-untyped-def]
    tl.store(weights + place * 2, best, mask=real)
    tl.store(weights + place * 2 + 1, weight, mask=real)


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
    """Write a sequence's result; of a sequence in parts leave this part's sums, which are reduced by what ends last.

    As many parts as are loaded at a time are a group. The last part of a group to end reduces the group, and the last group
    to end reduces the groups, in their order: one after another would take a turn for each group.
    """
    kv_heads: tl.constexpr = instance.cache.kv_heads
    group: tl.constexpr = instance.group
    dim: tl.constexpr = instance.cache.dim
    most: tl.constexpr = instance.reduced
    to_out = result_row(out, row, head, kv_heads, group, dim, instance.tile_rows)
    if parts == 1:
        put_result(to_out, acc / weight[:, None], row, head, line, group, dim, instance.tile_rows)
    else:
        put_part(sums, weights, (item * kv_heads + head) * group + line, acc, best, weight, real, dim)
        tl.debug_barrier()
        groups, step = parts, 1
        begun = first + (item - first) // most * most
        members = tl.minimum(most, first + parts - begun)
        reaches = True
        if parts > most:
            groups, step = (parts + most - 1) // most, most
            if members > 1:
                # A sequence's own counter is at its first part; those of its groups are at their second parts.
                reaches = _is_last(arrived + (begun + 1) * kv_heads + head, members)
                if reaches:
                    _reduce_group(sums, weights, begun, members, head, instance)
                    tl.debug_barrier()
        if reaches:
            _end(to_out, sums, weights, arrived, first, groups, step, row, head, instance)


@triton.jit  # type: ignore[untyped-decorator]
def _end(  # type: ignore[no-untyped-def]
    to_out, sums, weights, arrived, first, groups, step, row, head, instance: tl.constexpr
):
    """Reduce a sequence's groups where all others have ended, and write the result."""
    group: tl.constexpr = instance.group
    dim: tl.constexpr = instance.cache.dim
    width: tl.constexpr = instance.reduced_columns
    tile_rows: tl.constexpr = instance.tile_rows
    if _is_last(arrived + first * instance.cache.kv_heads + head, groups):
        line = tl.arange(0, instance.few)
        for column in tl.range(0, dim, width):
            acc, _, weight = _reduced(sums, weights, first, groups, step, head, column, instance)
            result = acc / tl.where(line < group, weight, 1.0)[:, None]
            put_columns(to_out, result, row, head, line, column, group, dim, width, tile_rows)


@triton.jit
def _is_last(counter, count):  # type: ignore[no-untyped-def]
    """Whether the thread block is the last of count to come here; then the counter is 0 again."""
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit  # type: ignore[untyped-decorator]
def _reduce_group(sums, weights, first, parts, head, instance: tl.constexpr):  # type: ignore[no-untyped-def]
    """Put the sums of parts that follow one another in the place of the first of them."""
    few: tl.constexpr = instance.few
    dim: tl.constexpr = instance.cache.dim
    width: tl.constexpr = instance.reduced_columns
    line = tl.arange(0, few)
    real = line < instance.group
    place = (first * instance.cache.kv_heads + head) * instance.group + line
    to_sums = sums + place[:, None] * dim + tl.arange(0, width)[None, :]
    best, weight = tl.zeros([few], tl.float32), tl.zeros([few], tl.float32)
    for column in tl.range(0, dim, width):
        acc, best, weight = _reduced(sums, weights, first, parts, 1, head, column, instance)
        tl.store(to_sums + column, acc, mask=real[:, None])
    if width != dim:
        # All threads have read the first part's weights for the last time.
        tl.debug_barrier()
    _put_weights(weights, place, best, weight, real)


@triton.jit  # type: ignore[untyped-decorator]
def _reduced(  # type: ignore[no-untyped-def]
    sums, weights, first, parts, step, head, column, instance: tl.constexpr
):
    """Some columns' sums, greatest scores and sums of weights of every step-th part from first on, in their order."""
    group: tl.constexpr = instance.group
    dim: tl.constexpr = instance.cache.dim
    line = tl.arange(0, instance.few)
    place = (first * instance.cache.kv_heads + head) * group + line
    sums += place[:, None] * dim + column + tl.arange(0, instance.reduced_columns)[None, :]
    weights += place * 2
    real = line < group
    pitch = step * instance.cache.kv_heads * group
    acc, best, weight = _part(sums, weights, 0, 0, real, pitch, dim)
    for part in tl.range(0, parts, instance.reduced):
        # All loads of a turn are in flight at once.
        loaded = _eight_parts(sums, weights, part, parts, real, pitch, dim)
        if instance.reduced == 16:
            more = _eight_parts(sums, weights, part + 8, parts, real, pitch, dim)
            acc, best, weight = both((acc, best, weight), both(_eight_as_one(loaded), _eight_as_one(more)))
        else:
            acc, best, weight = both((acc, best, weight), _eight_as_one(loaded))
    return acc, best, weight


@triton.jit  # type: ignore[untyped-decorator]
def result_row(  # type: ignore[no-untyped-def]
    out, row, head, kv_heads: tl.constexpr, group: tl.constexpr, dim: tl.constexpr, tile_rows: tl.constexpr
):
    """Start of put_result(), for a token's query heads that share a key head."""
    if tile_rows == 0:
        return out + (row.to(tl.int64) * kv_heads + head) * group * dim
    else:
        return out + (row // tile_rows).to(tl.int64) * (tile_rows * kv_heads * group * dim) + row % tile_rows * 64


@triton.jit  # type: ignore[untyped-decorator]
def put_result(  # type: ignore[no-untyped-def]
    out, result, row, head, line, group: tl.constexpr, dim: tl.constexpr, tile_rows: tl.constexpr
):
    """Store result [len(line), dim] of those heads, tiled (reference.tile_activations) where tile_rows is not 0."""
    put_columns(out, result, row, head, line, 0, group, dim, dim, tile_rows)


@triton.jit  # type: ignore[untyped-decorator]
def put_columns(  # type: ignore[no-untyped-def]
    out,
    result,
    row,
    head,
    line,
    first,
    group: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Do as put_result() does with `width` columns of dim, from first on."""
    result, column = result.to(out.dtype.element_ty), first + tl.arange(0, width)[None, :]
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
def _part(sums, weights, part, parts, real, pitch, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """A part's partial sums; zeros beyond the last part."""
    real = real & (part < parts)
    acc = tl.load(sums + part * pitch * dim, mask=real[:, None], other=0.0, cache_modifier=".cg")
    best = tl.load(weights + part * pitch * 2, mask=real, other=-1e38, cache_modifier=".cg")
    weight = tl.load(weights + part * pitch * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
    return acc, best, weight


@triton.jit  # type: ignore[untyped-decorator]
def _eight_parts(sums, weights, part, parts, real, pitch, dim: tl.constexpr):  # type: ignore[no-untyped-def]
    """The partial sums of eight parts that follow one another."""
    return (
        _part(sums, weights, part, parts, real, pitch, dim),
        _part(sums, weights, part + 1, parts, real, pitch, dim),
        _part(sums, weights, part + 2, parts, real, pitch, dim),
        _part(sums, weights, part + 3, parts, real, pitch, dim),
        _part(sums, weights, part + 4, parts, real, pitch, dim),
        _part(sums, weights, part + 5, parts, real, pitch, dim),
        _part(sums, weights, part + 6, parts, real, pitch, dim),
        _part(sums, weights, part + 7, parts, real, pitch, dim),
    )


@triton.jit
def _eight_as_one(eight):  # type: ignore[no-untyped-def]
    """Reduce what _eight_parts() has loaded."""
    first = both(both(eight[0], eight[1]), both(eight[2], eight[3]))
    return both(first, both(both(eight[4], eight[5]), both(eight[6], eight[7])))
