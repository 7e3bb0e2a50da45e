"""A router that computes in float32, in two launches: the logits of few tokens, and the selection."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from nf4_kernels.cuda.device import capability

_MAX_TOKENS = 64
"""Tokens of which a launch of ours computes logits: each token reads the weight."""
_EXPERTS, _COLUMNS = 4, 1024
"""Rows and columns of the weight that a thread block has at a time."""


def route(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, top_k: int, normalised: bool, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights float32 and experts int32, both [T, top_k]: SigmoidRouter with a bias, SoftmaxRouter without one.

    x [T, width] with contiguous rows, weight [experts, width] and bias [experts] contiguous, on CUDA. Experts come in
    descending order, equal ones in the order of their indices.
    """
    tokens, width = x.shape
    experts = weight.shape[0]
    overlap = capability(x.device)[0] >= 9
    if tokens <= _MAX_TOKENS:
        logits = x.new_empty(tokens, experts, dtype=torch.float32)
        _logits[(triton.cdiv(experts, _EXPERTS), tokens)](
            x, weight, logits, x.stride(0), experts, width, _EXPERTS, _COLUMNS, overlap, num_warps=4, launch_pdl=overlap
        )
    else:
        logits = torch.nn.functional.linear(x.float(), weight.float())
    weights = x.new_empty(tokens, top_k, dtype=torch.float32)
    chosen = x.new_empty(tokens, top_k, dtype=torch.int32)
    _select[(tokens,)](
        logits,
        logits if bias is None else bias,
        weights,
        chosen,
        factor,
        bias is not None,
        experts,
        triton.next_power_of_2(experts),
        top_k,
        triton.next_power_of_2(top_k),
        normalised,
        overlap,
        num_warps=1,
        launch_pdl=overlap,
    )
    return weights, chosen


@triton.jit  # type: ignore[untyped-decorator]
def _logits(  # type: ignore[no-untyped-def]
    x,
    weight,
    logits,
    x_pitch,
    experts,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    overlap: tl.constexpr,
):
    if overlap:  # docs/adr/0010-pdl-and-weight-prefetch.md
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    row, column = tl.program_id(0) * rows + tl.arange(0, rows), tl.arange(0, columns)
    sums = tl.zeros([rows, columns], tl.float32)
    for first in tl.static_range(0, width, columns):
        inside = first + column < width
        values = tl.load(x + token * x_pitch + first + column, mask=inside, other=0.0).to(tl.float32)
        places = weight + row[:, None].to(tl.int64) * width + first + column[None, :]
        factors = tl.load(places, mask=(row < experts)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        sums += values[None, :] * factors
    tl.store(logits + token * experts + row, tl.sum(sums, 1), mask=row < experts)


@triton.jit  # type: ignore[untyped-decorator]
def _select(  # type: ignore[no-untyped-def]
    logits,
    bias,
    weights,
    chosen,
    factor,
    has_bias: tl.constexpr,
    experts: tl.constexpr,
    block: tl.constexpr,
    top_k: tl.constexpr,
    places: tl.constexpr,
    normalised: tl.constexpr,
    overlap: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, block), tl.arange(0, places)
    inside = expert < experts
    added = tl.zeros([block], tl.float32)
    if has_bias:
        # A parameter, which no launch writes: it may be read before the launch in front has ended.
        added = tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    scores = tl.load(logits + token * experts + expert, mask=inside, other=-float("inf"))
    if has_bias:
        scores = tl.sigmoid(scores)
    else:
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    left = tl.where(inside, scores + added, -float("inf"))
    own, ids = tl.zeros([places], tl.float32), tl.zeros([places], tl.int32)
    for n in tl.static_range(top_k):
        best = tl.min(tl.where(left == tl.max(left, 0), expert, block), 0)
        own = tl.where(place == n, tl.sum(tl.where(expert == best, scores, 0.0), 0), own)
        ids = tl.where(place == n, best, ids)
        left = tl.where(expert == best, -float("inf"), left)
    if normalised:
        own = own / (tl.sum(own, 0) + 1e-20)
    tl.store(weights + token * top_k + place, own * factor, mask=place < top_k)
    tl.store(chosen + token * top_k + place, ids, mask=place < top_k)
