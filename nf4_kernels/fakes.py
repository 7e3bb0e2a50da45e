"""Shapes and dtypes of the results of nf4_kernels.ops' ops, for tracing without data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nf4_kernels import reference


def register() -> None:
    """Register the fakes with torch; the ops must be defined already."""
    for name, shape in (
        ("linear", _linear_shape),
        ("fused_linear", _linear_shape),
        ("tiled_linear", _tiled_shape),
        ("gated_linear", _gated_shape),
        ("dequantize", _dequantize_shape),
        ("linear_bf16w", _bf16w_shape),
    ):
        torch.library.register_fake(f"nf4::{name}", shape)


def _linear_shape(x: Tensor, packed: Tensor, shape: Sequence[int], *_: object) -> Tensor:
    torch._check(x.shape[-1] == shape[1], lambda: f"x ends in {x.shape[-1]}, the weight is {list(shape)}")
    return x.new_empty((*x.shape[:-1], shape[0]))


def _tiled_shape(tiles: Tensor, tokens: int, packed: Tensor, shape: Sequence[int], *_: object) -> Tensor:
    torch._check(tiles.shape[1] * 64 >= shape[1], lambda: f"tiles of {tiles.shape[1] * 64} columns, K = {shape[1]}")
    return tiles.new_empty(tokens, shape[0])


def _gated_shape(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    activation: str = "silu",
    tile: int = 0,
    group_offset: int = 0,
    group_skip: int = 0,
) -> Tensor:
    out = _linear_shape(x, packed, (shape[0] // 2, shape[1]))
    return out.new_empty(reference.tiles_shape(math.prod(out.shape[:-1]), shape[0] // 2, tile)) if tile else out


def _dequantize_shape(
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    dtype: torch.dtype,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
    group_offset: int = 0,
    group_skip: int = 0,
) -> Tensor:
    return packed.new_empty(list(shape), dtype=dtype)


def _bf16w_shape(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    torch._check(x.shape[-1] == weight.shape[1], lambda: f"x ends in {x.shape[-1]}, the weight in {weight.shape[1]}")
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
