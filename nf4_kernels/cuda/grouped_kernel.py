"""The Triton kernel of grouped.py."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit(do_not_specialize=["first", "last", "count", "x_choices"])  # type: ignore[untyped-decorator,unused-ignore]
def multiply_tiles(  # type: ignore[no-untyped-def]
    x, weights, out, order, starts, tile_ends, first, last, count, n, k, x_choices,
    tile_tokens: tl.constexpr, tile_columns: tl.constexpr, k_step: tl.constexpr, most_experts: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of choices of one expert by rows of its weight: out[choice] [n] = W x[choice // x_choices].

    weights: those of experts first to last, [last - first, n, k]; a tile of another expert is left to another launch. order:
    choices by their experts, starts [count + 1]: where each expert's begin in it, tile_ends [count]: tiles up to each one's
    last. k is a multiple of k_step. most_experts is a power of two, count at least.
    """
    tile = tl.program_id(0)
    experts = tl.arange(0, most_experts)
    ends = tl.load(tile_ends + experts, mask=experts < count, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32))
    if (expert >= first) & (expert < last):
        before = tl.max(tl.where(ends <= tile, ends, 0))
        place = tl.load(starts + expert) + (tile - before) * tile_tokens + tl.arange(0, tile_tokens)
        valid = place < tl.load(starts + expert + 1)
        choice = tl.load(order + place, mask=valid, other=0)
        column = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
        at_k = tl.arange(0, k_step)
        rows = x + (choice // x_choices).to(tl.int64)[:, None] * k + at_k[None, :]
        own = weights + (expert - first).to(tl.int64) * n * k
        columns = own + tl.minimum(column, n - 1).to(tl.int64)[None, :] * k + at_k[:, None]
        total = tl.zeros((tile_tokens, tile_columns), tl.float32)
        for step in range(0, k, k_step):
            total = tl.dot(tl.load(rows + step, mask=valid[:, None], other=0.0), tl.load(columns + step), total)
        to = out + choice.to(tl.int64)[:, None] * n + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=valid[:, None] & (column < n)[None, :])
