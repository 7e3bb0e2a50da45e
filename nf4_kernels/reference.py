"""The oracle: NF4 dequantize and linear in plain torch, on any device, for any shape. Every kernel is tested against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nf4_kernels.format import CODEBOOK, block_scales, check, unpack
from nf4_kernels.params import ACTIVATIONS


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
    return functional.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., K] by the root of (its squares' mean + eps), rounded, times weight [K]; in float32, as models do it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def check_gate(n: int, activation: str, tile: int) -> None:
    """ValueError where gated() of n columns cannot be."""
    if activation not in ACTIVATIONS or n % 2 or tile < 0:
        given = f"{activation!r}, {n}, {tile}"
        raise ValueError(f"activation must be one of {tuple(ACTIVATIONS)}, N even and tile at least 0, got {given}")


def gated(gate_up: Tensor, activation: str, tile: int = 0) -> Tensor:
    """gate_up [..., 2 K]: activation (params.ACTIVATIONS) of its first K, rounded, times its last: [..., K].

    tile: where not 0, arrange() of all these rows.
    """
    gate, up = gate_up.chunk(2, -1)
    activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    out = activated * up
    return arrange(out.reshape(-1, out.shape[-1]), tile) if tile else out


def tiles_shape(rows: int, k: int, tile: int) -> tuple[int, int, int, int]:
    """The shape of arrange()d rows [rows, k]: [ceil(rows / tile), ceil(k / 256) * 4, tile, 64]."""
    return -(-rows // tile), -(-k // 256) * 4, tile, 64


def arrange(x: Tensor, tile: int) -> Tensor:
    """x [rows, K] of a 16-bit type in linear_wgmma's order: tiles, see tiles_shape().

    A tile holds 64 k of `tile` rows, as its products read them from shared memory: word j * 8 + c of a row's 32 (two k
    each) is word j of the row's 16-byte chunk c ^ (row % 8). What is beyond rows and K is zeros.
    """
    rows, k = x.shape
    shape = tiles, blocks, _, _ = tiles_shape(rows, k, tile)
    padded = x.new_zeros(tiles * tile, blocks * 64)
    padded[:rows, :k] = x
    words = padded.view(tiles, tile, blocks, 4, 8, 2).permute(0, 2, 1, 4, 3, 5)
    return words.gather(3, _chunks(words)).reshape(shape)


def arranged_rows(tiles: Tensor, rows: int, k: int) -> Tensor:
    """x [rows, k] of which tiles is arrange()."""
    count, blocks, tile, _ = tiles.shape
    words = tiles.view(count, blocks, tile, 8, 4, 2)
    words = words.gather(3, _chunks(words)).permute(0, 2, 1, 4, 3, 5)
    return words.reshape(count * tile, blocks * 64)[:rows, :k]


def _chunks(words: Tensor) -> Tensor:
    """For words [tiles, blocks, row, chunk, 4, 2]: which chunk of the row lies at each place; its own inverse."""
    row, chunk = torch.arange(words.shape[2], device=words.device), torch.arange(8, device=words.device)
    return (chunk ^ row[:, None] % 8)[None, None, :, :, None, None].expand(words.shape)
