"""The oracle: NF4 dequantize and linear in plain torch, on any device, for any shape. Every kernel is tested against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nf4_kernels.format import CODEBOOK, block_scales, check, unpack


def dequantize(
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    dtype: torch.dtype,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """The weight in dtype: float32 code times float32 scale, then one rounding. Arguments as in docs/architecture.md."""
    count = check(packed, shape, absmax, blocksize, absmax_8bit)
    values = torch.tensor(CODEBOOK, dtype=torch.float32, device=packed.device)[unpack(packed, count)]
    scales = block_scales(absmax, absmax_8bit, absmax_code, absmax_offset)
    values *= scales.repeat_interleave(blocksize)[:count]
    return values.to(dtype).reshape([int(size) for size in shape])


def linear(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """x [..., K] times the transposed weight plus bias, [..., N] in x's dtype: dequantize to x's dtype, then torch."""
    weight = dequantize(packed, shape, absmax, blocksize, x.dtype, absmax_8bit, absmax_code, absmax_offset)
    return torch.nn.functional.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., K] by the root of (its squares' mean + eps), rounded, times weight [K]; in float32, as models do it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
