"""Penalties and masks over rows of logits, each in one launch."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

_WIDTH = 4096


def penalize_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    penalties: torch.Tensor,
    counts: torch.Tensor,
    counted_rows: torch.Tensor,
    newest: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See torch_ops.penalize_rows(). Every operation is rounded as torch's are."""
    vocabulary = logits.shape[1]
    grid = len(rows), triton.cdiv(vocabulary, _WIDTH)
    _penalize[grid](
        logits, logits.stride(0), rows, penalties, counts, counted_rows, newest, out, vocabulary, _WIDTH,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def mask_rows(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    """See torch_ops.mask_rows()."""
    vocabulary, words = logits.shape[1], masks.shape[1] // 4
    grid = len(places), triton.cdiv(vocabulary, _WIDTH)
    _mask[grid](logits, places, masks.view(torch.int32), words, vocabulary, _WIDTH, num_warps=8)


@triton.jit  # type: ignore[untyped-decorator]
def _penalize(  # type: ignore[no-untyped-def]
    logits, stride, rows, penalties, counts, counted_rows, newest, out, vocabulary, width: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * width + tl.arange(0, width)
    inside = at < vocabulary
    value = tl.load(logits + tl.load(rows + index) * stride + at, mask=inside, other=0.0).to(tl.float32)
    counted = counts + tl.load(counted_rows + index) * vocabulary + at
    had = tl.load(counted, mask=inside, other=0)
    is_newest = at == tl.load(newest + index)
    had = tl.where(is_newest, (had + 2) | 1, had)
    tl.store(counted, had, mask=inside & is_newest)
    repetition = tl.load(penalties + index * 3)
    presence = tl.load(penalties + index * 3 + 1)
    frequency = tl.load(penalties + index * 3 + 2)
    repeated = tl.where(value < 0, value * repetition, tl.div_rn(value, repetition))
    value = tl.where(had > 0, repeated, value)
    times = had >> 1
    value = value - (presence * (times > 0).to(tl.float32) + frequency * times.to(tl.float32))
    tl.store(out + index * vocabulary + at, value, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _mask(logits, places, masks, words, vocabulary, width: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * width + tl.arange(0, width)
    inside = at < vocabulary
    word = tl.load(masks + index * words + at // 32, mask=inside, other=-1)
    forbidden = ((word >> (at % 32)) & 1) == 0
    row = logits + tl.load(places + index) * vocabulary
    tl.store(row + at, tl.full([width], -float("inf"), tl.float32), mask=inside & forbidden)
