"""Shapes and dtypes of the results of nf4_kernels.ops' ops, for tracing without data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nf4_kernels import reference
from nf4_kernels.format import Weight, with_weight


def register() -> None:
    """Register the fakes with torch; the ops must be defined already."""
    for name, place, shape in (
        ("linear", 1, _linear_shape),
        ("fused_linear", 1, _linear_shape),
        ("tiled_linear", 1, _tiled_shape),
        ("gated_linear", 1, _gated_shape),
        ("dequantize", 0, _dequantize_shape),
    ):
        torch.library.register_fake(f"nf4::{name}", with_weight(shape, place))
    torch.library.register_fake("nf4::linear_bf16w", _bf16w_shape)


def _linear_shape(x: Tensor, weight: Weight, *_: object) -> Tensor:
    n, k = weight.shape
    torch._check(x.shape[-1] == k, lambda: f"x ends in {x.shape[-1]}, the weight is {[n, k]}")
    return x.new_empty((*x.shape[:-1], n))


def _tiled_shape(tiles: Tensor, weight: Weight, tokens: int, *_: object) -> Tensor:
    n, k = weight.shape
    torch._check(tiles.shape[1] * 64 >= k, lambda: f"tiles of {tiles.shape[1] * 64} columns, K = {k}")
    return tiles.new_empty(tokens, n)


def _gated_shape(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    activation: str = "silu",
    tile: int = 0,
) -> Tensor:
    out = _linear_shape(x, weight)
    half = weight.shape[0] // 2
    if tile:
        return out.new_empty(reference.tiles_shape(math.prod(out.shape[:-1]), half, tile))
    return out.new_empty((*out.shape[:-1], half))


def _dequantize_shape(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.packed.new_empty(list(weight.shape), dtype=dtype)


def _bf16w_shape(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    torch._check(x.shape[-1] == weight.shape[1], lambda: f"x ends in {x.shape[-1]}, the weight in {weight.shape[1]}")
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
