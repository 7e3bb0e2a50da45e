"""The largest logit of each row and its token in one launch."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

_WIDTH = 8192


def largest_of_rows(logits: torch.Tensor) -> torch.Tensor:
    """float32 [2, rows]: the largest logit of each row, NaN where the row has one, and the first token that has it.

    logits [rows, vocabulary], bfloat16, float16 or float32, contiguous in its last dimension. A token is exact up to 2**24.
    """
    rows, vocabulary = logits.shape
    out = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    _largest[(rows,)](logits, logits.stride(0), vocabulary, out, rows, _WIDTH, num_warps=16)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _largest(logits, stride, vocabulary, out, rows, width: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([width], -float("inf"), tl.float32)
    token = tl.zeros([width], tl.int32)
    is_number = tl.full([width], 1, tl.int32)
    for start in tl.range(0, vocabulary, width, loop_unroll_factor=4):
        at = start + tl.arange(0, width)
        value = tl.load(logits + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        token = tl.where(value > largest, at, token)
        largest = tl.maximum(largest, value)
        is_number &= (value == value).to(tl.int32)  # noqa: PLR0124 - NaN is unequal to itself
    best = tl.max(largest)
    first = tl.min(tl.where(largest == best, token, vocabulary))
    tl.store(out + row, tl.where(tl.min(is_number) == 1, best, float("nan")))
    tl.store(out + rows + row, first.to(tl.float32))
