"""The largest logit of each row and its token in one launch."""

from __future__ import annotations

import functools

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

_WIDTH = 8192
# A row is divided among thread blocks as long as there are no more of them: one alone takes 9 us for 128256 logits.
_BLOCKS, _MAX_PARTS = 256, 16


def largest_of_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See torch_ops.largest_of_rows(). A token is exact up to 2**24. Launches of one stream at a time."""
    rows, vocabulary = logits.shape
    best = torch.empty(rows, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    tiles = triton.cdiv(vocabulary, _WIDTH)
    # Tiles of a part, and as many parts as that takes.
    own_tiles = triton.cdiv(tiles, max(1, min(_BLOCKS // max(1, rows), _MAX_PARTS, tiles)))
    parts = triton.cdiv(tiles, own_tiles)
    partials = torch.empty(rows, parts, 2, dtype=torch.float32, device=logits.device)
    arrived = _arrivals(logits.device)
    _largest[(rows, parts)](
        logits, logits.stride(0), vocabulary, best, tokens, partials, arrived, parts, own_tiles, _WIDTH, _MAX_PARTS,
        num_warps=16,
    )  # fmt: skip
    return best, tokens


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Parts of each row that have ended: zeros before and after a launch. At most half of _BLOCKS rows have parts."""
    with torch.inference_mode(False):
        return torch.zeros(_BLOCKS, dtype=torch.int32, device=device)


# Compiled once, not anew for numbers of parts of 1 or multiples of 16.
@triton.jit(do_not_specialize=["parts", "own_tiles"])  # type: ignore[untyped-decorator]
def _largest(  # type: ignore[no-untyped-def]
    logits,
    stride,
    vocabulary,
    best,
    tokens,
    partials,
    arrived,
    parts,
    own_tiles,
    width: tl.constexpr,
    max_parts: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # A multiple of the width, as the compiler sees: loads have 16 bytes.
    begin = part * own_tiles * width
    end = tl.minimum(begin + own_tiles * width, vocabulary)
    largest = tl.full([width], -float("inf"), tl.float32)
    token = tl.zeros([width], tl.int32) + begin
    is_number = tl.full([width], 1, tl.int32)
    for tile in tl.range(0, own_tiles, 1, loop_unroll_factor=4):
        at = begin + tile * width + tl.arange(0, width)
        value = tl.load(logits + row * stride + at, mask=at < end, other=-float("inf")).to(tl.float32)
        token = tl.where(value > largest, at, token)
        largest = tl.maximum(largest, value)
        is_number &= (value == value).to(tl.int32)  # noqa: PLR0124 - NaN is unequal to itself
    highest = tl.max(largest)
    # Where all are NaN no token is found, and one of the vocabulary is named.
    first = tl.minimum(tl.min(tl.where(largest == highest, token, vocabulary)), vocabulary - 1)
    highest = tl.where(tl.min(is_number) == 1, highest, float("nan"))
    if parts == 1:
        tl.store(best + row, highest)
        tl.store(tokens + row, first.to(tl.int64))
    else:
        own = partials + row * parts * 2
        tl.store(own + part * 2, highest)
        tl.store(own + part * 2 + 1, first.to(tl.float32))
        tl.debug_barrier()
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == parts - 1:
            tl.store(arrived + row, 0)
            each = tl.arange(0, max_parts)
            there = each < parts
            values = tl.load(own + each * 2, mask=there, other=-float("inf"))
            firsts = tl.load(own + each * 2 + 1, mask=there, other=float("inf"))
            is_nan = tl.max((values != values).to(tl.int32))  # noqa: PLR0124
            of_row = tl.max(tl.where(values == values, values, -float("inf")))  # noqa: PLR0124
            tl.store(best + row, tl.where(is_nan == 1, float("nan"), of_row))
            token_of_row = tl.minimum(tl.min(tl.where(values == of_row, firsts, float("inf"))), vocabulary - 1.0)
            tl.store(tokens + row, token_of_row.to(tl.int64))
