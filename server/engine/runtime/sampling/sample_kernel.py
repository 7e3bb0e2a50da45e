"""Tokens sampled from rows of logits in one launch, with the filters, without sorting the vocabulary."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

# Bits of a logit's type that are always zero once it is a float32.
_ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
_WIDTH = 8192


def sample_rows(logits: torch.Tensor, parameters: torch.Tensor, tokens: torch.Tensor) -> None:
    """See torch_ops.sample_rows(); parameters is its table."""
    _sample[(parameters.shape[0],)](
        logits, logits.stride(0), logits.shape[1], parameters, tokens, _ZERO_BITS[logits.dtype], _WIDTH, num_warps=16
    )


@triton.jit
def _ordered(value):  # type: ignore[no-untyped-def]
    """Integers in the order of float32s."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _values(row, at, vocabulary):  # type: ignore[no-untyped-def]
    """Logits as float32; -inf beyond the vocabulary."""
    return tl.load(row + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _above(row, vocabulary, key, best, temperature, shift: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number of logits that lie above a key, and the sum of their weights."""
    count = tl.zeros([width], tl.int32)
    mass = tl.zeros([width], tl.float32)
    for start in tl.range(0, vocabulary, width, loop_unroll_factor=4):
        at = start + tl.arange(0, width)
        value = _values(row, at, vocabulary)
        higher = (_ordered(value) >> shift) > key
        count += higher.to(tl.int32)
        mass += tl.where(higher, tl.exp((value - best) / temperature), 0.0)
    return tl.sum(count), tl.sum(mass.to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _kept(value, key, best, temperature, min_p, shift: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights in float64, 0 for what is not kept."""
    weight = tl.exp((value - best) / temperature)
    return tl.where(((_ordered(value) >> shift) >= key) & (weight >= min_p), weight, 0.0).to(tl.float64)


@triton.jit  # type: ignore[untyped-decorator]
def _highest(row, vocabulary, width: tl.constexpr):  # type: ignore[no-untyped-def]
    highest = tl.full([width], -float("inf"), tl.float32)
    for start in tl.range(0, vocabulary, width, loop_unroll_factor=4):
        at = start + tl.arange(0, width)
        value = _values(row, at, vocabulary)
        highest = tl.maximum(highest, value)
    return tl.max(highest)


@triton.jit  # type: ignore[untyped-decorator]
def _least(row, vocabulary, best, temperature, top_k, top_p, shift: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least key that top_k and top_p keep, found by halving. It lies in (low, high]."""
    high = (_ordered(best) >> shift).to(tl.int64)
    # The weight of a logit below is 0 in float32 and it is never sampled, so the search may end there.
    bottom = tl.maximum(best - 110.0 * temperature, -3.0e38)
    low = (_ordered(bottom) >> shift).to(tl.int64) - 1
    key = low + 1
    if top_k < vocabulary:
        key = high
        while key - low > 1:
            middle = low + (key - low) // 2
            count, _ = _above(row, vocabulary, middle.to(tl.int32), best, temperature, shift, width)
            if count < top_k:
                key = middle
            else:
                low = middle
        low = key - 1
    if top_p < 1.0:
        _, mass = _above(row, vocabulary, low.to(tl.int32), best, temperature, shift, width)
        key = high
        while key - low > 1:
            middle = low + (key - low) // 2
            _, before = _above(row, vocabulary, middle.to(tl.int32), best, temperature, shift, width)
            if before < top_p * mass:
                key = middle
            else:
                low = middle
    return key


@triton.jit  # type: ignore[untyped-decorator]
def _sample(logits, stride, vocabulary, parameters, tokens, shift: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    parameters += tl.program_id(0) * 6
    place = tl.load(parameters).to(tl.int64)
    temperature = tl.load(parameters + 1).to(tl.float32)
    top_k = tl.load(parameters + 3).to(tl.int32)
    min_p = tl.load(parameters + 5).to(tl.float32)
    row = logits + place * stride
    best = _highest(row, vocabulary, width)
    key = _least(row, vocabulary, best, temperature, top_k, tl.load(parameters + 4), shift, width)
    offsets = tl.arange(0, width)
    sums = tl.zeros([width], tl.float64)
    for start in tl.range(0, vocabulary, width, loop_unroll_factor=4):
        value = _values(row, start + offsets, vocabulary)
        sums += _kept(value, key, best, temperature, min_p, shift)
    target = tl.load(parameters + 2) * tl.sum(sums)
    # Find the stretch of the vocabulary in which the running sum passes the target. Rounding may leave it in none of them;
    # then it is the last one with a kept token.
    found = 0
    before = tl.full([], 0.0, tl.float64)
    found_before = before
    # An `if` in a `while` that ends early would do, but on the device found_before then keeps its first value (Triton 3.6).
    for start in tl.range(0, vocabulary, width):
        value = _values(row, start + offsets, vocabulary)
        own = tl.sum(_kept(value, key, best, temperature, min_p, shift))
        reached = (own > 0) & (before <= target)
        found = tl.where(reached, start, found)
        found_before = tl.where(reached, before, found_before)
        before += own
    at = found + offsets
    value = _values(row, at, vocabulary)
    weights = _kept(value, key, best, temperature, min_p, shift)
    first = tl.min(tl.where(found_before + tl.cumsum(weights) > target, at, vocabulary))
    last = tl.max(tl.where(weights > 0, at, 0))
    tl.store(tokens + place, tl.minimum(first, last).to(tl.int64))
