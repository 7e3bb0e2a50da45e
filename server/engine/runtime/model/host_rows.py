"""The launch that reads rows of an embedding in host memory, in eager steps as in CUDA graphs."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

_COLUMNS = 1024


def rows_of(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """table[ids], [..., hidden] on the device of ids int64 [...]; a table [tokens, hidden] in pinned host memory.

    Ids outside of the table give its first or last row.
    """
    count, hidden = table.shape
    flat = ids.reshape(-1)
    out = torch.empty(flat.numel(), hidden, dtype=table.dtype, device=ids.device)
    if flat.numel():
        _rows[(flat.numel(), triton.cdiv(hidden, _COLUMNS))](flat, table, out, count, hidden, _COLUMNS)
    return out.view(*ids.shape, hidden)


@triton.jit  # type: ignore[untyped-decorator]
def _rows(ids, table, out, count, hidden, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    token = tl.load(ids + row)
    token = tl.minimum(tl.maximum(token, 0), count - 1)
    found = tl.load(table + token * hidden + column, mask=column < hidden)
    tl.store(out + row * hidden + column, found, mask=column < hidden)
