"""Experts' GEMMs of many choices without wgmma: slices of the weights are dequantized and multiplied by a Triton kernel.

torch's grouped GEMM is one launch on Hopper only; elsewhere it waits for the host, so that no graph can have it. can_group()
says whether Triton is there.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from nf4_kernels.cuda.launches import dequantize_into
from nf4_kernels.format import Weight, second_level
from nf4_kernels.params import weight_struct
from nf4_kernels.plan.moe import MoeGrouped

_COLUMNS, _K = 128, 64
"""Weight rows of a tile, and the k of a step."""


@functools.cache
def can_group() -> bool:
    """Whether Triton is there, which comes with torch for CUDA."""
    return importlib.util.find_spec("triton") is not None


def grouped_linear(x: Tensor, weight: Weight, experts: Tensor, plan: MoeGrouped) -> Tensor:
    """x [tokens, k] or [tokens, top_k, k] times the weights [E, n, k] of experts [tokens, top_k]: [choices, n] in x's dtype.

    Rows of choices whose expert is none of E hold anything.
    """
    count, n, k = weight.shape
    choices = experts.numel()
    ids = experts.reshape(-1)
    known = torch.where((ids >= 0) & (ids < count), ids, count)
    order, starts, tile_ends = _tiles(known, count, plan.tokens)
    out = torch.empty((choices, n), dtype=x.dtype, device=x.device)
    struct = weight_struct(weight, count * n, k, None if weight.absmax_8bit is None else second_level(weight))
    at_once = plan.experts_at_once(count, n, k)
    dense = torch.empty((at_once, n, k), dtype=x.dtype, device=x.device)
    most_tiles = plan.most_tiles(choices, count)
    for first in range(0, count, at_once):
        last = min(first + at_once, count)
        dequantize_into(dense, struct, first * n * k, (last - first) * n * k)
        _kernel()[(most_tiles, -(-n // _COLUMNS))](
            *(
                x,
                dense,
                out,
                order,
                starts,
                tile_ends,
                first,
                last,
                count,
                n,
                k,
                1 if x.ndim == 3 else experts.shape[1],
            ),
            tile_tokens=plan.tokens,
            tile_columns=_COLUMNS,
            k_step=_K,
            most_experts=1 << (count - 1).bit_length(),
            num_warps=4,
            num_stages=3,
        )
    return out


def _tiles(ids: Tensor, count: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choices in the order of their experts; where each expert's begin [count + 1]; and its tiles' ends [count]."""
    sorted_ids, order = torch.sort(ids, stable=True)
    starts = torch.searchsorted(sorted_ids, torch.arange(count + 1, device=ids.device, dtype=ids.dtype))
    tile_ends = ((starts.diff() + tokens - 1) // tokens).cumsum(0)
    return order.int(), starts.int(), tile_ends.int()


@functools.cache
def _kernel() -> Any:
    """The kernel; Triton is imported where it is first launched."""
    from nf4_kernels.cuda.grouped_kernel import multiply_tiles

    return multiply_tiles
