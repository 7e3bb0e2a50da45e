"""One launch that lays out the step behind one that a CUDA graph has computed, where the host does not know its tokens."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

_ITEMS = 128


def advance(
    numbers: torch.Tensor,
    first: int,
    fields: int,
    items: int,
    inputs: torch.Tensor,
    tokens: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
) -> None:
    """Let the first len(tokens) sequences of a decode step go on by one token each; the others stay as they are.

    numbers: int32, decode.layout() of one window that has all keys; its items, at most that many, lie from first on, fields
    numbers each. A sequence's last part gets its new key. inputs int64 [3, size], the graph's: token ids, positions, cache
    slots. tokens int64: the sequences' new tokens. tables int32 [any, blocks of the longest], contiguous: the rows that
    items name, in which the new tokens have their blocks already.
    """
    _advance[(triton.cdiv(items, _ITEMS),)](
        numbers,
        inputs,
        tokens,
        tables,
        len(tokens),
        inputs.shape[1],
        tables.shape[1],
        block_size,
        first,
        fields,
        _ITEMS,
    )


# Compiled once, not anew for sizes of 1 or multiples of 16: steps would wait for it.
@triton.jit(do_not_specialize=["going", "size", "width"])  # type: ignore[untyped-decorator]
def _advance(  # type: ignore[no-untyped-def]
    numbers,
    inputs,
    tokens,
    tables,
    going,
    size,
    width,
    block_size: tl.constexpr,
    first: tl.constexpr,
    fields: tl.constexpr,
    items: tl.constexpr,
):
    item = tl.program_id(0) * items + tl.arange(0, items)
    at = numbers + first + item * fields
    inside = item < tl.load(numbers)
    sequence = tl.load(at, mask=inside, other=0)
    moving = inside & (sequence < going)
    end = tl.load(at + 2, mask=moving, other=0)
    newest = tl.load(at + 3, mask=moving, other=0)
    lead = tl.load(at + 4, mask=moving, other=0)
    row = tl.load(at + 6, mask=moving, other=0).to(tl.int64)
    tl.store(at + 2, end + 1, mask=moving & (end == newest + 1))
    newest += 1
    tl.store(at + 3, newest, mask=moving)
    # A sequence's first item writes its inputs.
    leading = moving & (lead == item)
    block = tl.load(tables + row * width + newest // block_size, mask=leading, other=0).to(tl.int64)
    token = tl.load(tokens + sequence, mask=leading, other=0)
    position = tl.load(inputs + size + sequence, mask=leading, other=0)
    tl.store(inputs + sequence, token, mask=leading)
    tl.store(inputs + size + sequence, position + 1, mask=leading)
    tl.store(inputs + 2 * size + sequence, block * block_size + newest % block_size, mask=leading)
