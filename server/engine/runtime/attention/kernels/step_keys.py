"""Keys and values that the same step computes, and that are not in the KV cache yet."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from server.engine.runtime.attention.kernels.key_tiles import add_tile

# Keys that are added at a time; a sequence mostly has no more in a step.
_STEP_TILE = tl.constexpr(16)


@triton.jit  # type: ignore[untyped-decorator]
def add_rows(sums, q, q_rest, rows, begin, end, scale, instance: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add keys [begin, end) to the sums, greatest scores and sums of weights; there may be none.

    rows: the step's keys and values of a head, how far apart tokens are in them, and a key's row less its place in the
    sequence. instance: a DecodeInstance for a cache in 16 bits.
    """
    tile: tl.constexpr = _STEP_TILE
    # As a constant of its own: the compiler passes no attribute that is an object to another function.
    shape: tl.constexpr = instance.cache
    acc, best, weight = sums
    keys, values, key_token, value_token, offset = rows
    column, second = tl.arange(0, shape.dim), tl.arange(0, shape.second)
    for start in tl.range(begin, end, tile, num_stages=1):
        at = start + tl.arange(0, tile)
        inside = at < end
        row = (at + offset).to(tl.int64)[:, None]
        k = tl.load(keys + row * key_token + column[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(values + row * value_token + second[None, :], mask=inside[:, None], other=0.0)
        seen = inside[None, :]
        acc, best, weight = add_tile(acc, best, weight, q, q_rest, k, v, 1.0, 1.0, seen, scale, instance.cap, shape)
    return acc, best, weight
