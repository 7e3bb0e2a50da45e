"""Parts of nested weights as tensor parallelism has them, with NaN for second-level scales that a part has no use for."""

from __future__ import annotations

from dataclasses import replace

import torch

from nf4_kernels import Weight
from nf4_kernels.format import NESTED_BLOCKSIZE


def along_n(whole: Weight, rows: range) -> Weight:
    """Some rows of a nested weight [n, k], beginning and ending with whole scale blocks."""
    n, k = whole.matrix
    first, stop = rows.start * k // whole.blocksize, rows.stop * k // whole.blocksize
    assert (first * whole.blocksize, stop * whole.blocksize) == (rows.start * k, rows.stop * k)
    groups = range(first // NESTED_BLOCKSIZE, (stop - 1) // NESTED_BLOCKSIZE + 1)
    assert whole.absmax_8bit is not None
    return replace(
        whole,
        shape=(len(rows), k),
        packed=whole.packed.view(n, k // 2)[rows.start : rows.stop].flatten().clone(),
        absmax_8bit=whole.absmax_8bit[first:stop].clone(),
        absmax=whole.absmax[groups.start : groups.stop].clone(),
        absmax_offset=_second_level(whole.absmax_offset, slice(groups.start, groups.stop)),
        group_offset=first % NESTED_BLOCKSIZE,
    )


def along_k(whole: Weight, columns: range) -> Weight:
    """Some columns of a nested weight [n, k], whose rows are whole scale blocks as the columns are."""
    n, k = whole.matrix
    size = whole.blocksize
    blocks, first, stop = k // size, columns.start // size, columns.stop // size
    assert (blocks * size, first * size, stop * size) == (k, columns.start, columns.stop)
    assert whole.absmax_8bit is not None
    own = torch.arange(n * blocks, device=whole.packed.device).view(n, blocks)[:, first:stop]
    unused = torch.ones_like(whole.absmax, dtype=torch.bool)
    unused[own // NESTED_BLOCKSIZE] = False
    # Behind the last group that is used there is nothing.
    held = slice(0, int((~unused).nonzero()[-1]) + 1)
    offset = _second_level(whole.absmax_offset, held)
    return replace(
        whole,
        shape=(n, len(columns)),
        packed=whole.packed.view(n, k // 2)[:, columns.start // 2 : columns.stop // 2].contiguous().flatten(),
        absmax_8bit=whole.absmax_8bit.view(n, blocks)[:, first:stop].contiguous().flatten(),
        absmax=whole.absmax.masked_fill(unused, float("nan"))[held].clone(),
        absmax_offset=offset if offset.numel() == 1 else offset.masked_fill(unused[held], float("nan")),
        group_offset=first,
        group_skip=blocks - (stop - first),
    )


def _second_level(offset: torch.Tensor | None, held: slice) -> torch.Tensor:
    assert offset is not None
    return offset if offset.numel() == 1 else offset[held].clone()
