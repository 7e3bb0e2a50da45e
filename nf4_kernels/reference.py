"""The oracle: NF4 dequantize and linear in plain torch, on any device, for any shape. Every kernel is tested against it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nf4_kernels.format import CODEBOOK, Weight, block_scales, check, unpack
from nf4_kernels.params import ACTIVATIONS


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight in dtype: float32 code times float32 scale, then one rounding. ValueError where tensors are too small."""
    count = check(weight)
    values = torch.tensor(CODEBOOK, dtype=torch.float32, device=weight.packed.device)[unpack(weight.packed, count)]
    values *= block_scales(weight).repeat_interleave(weight.blocksize)[:count]
    return values.to(dtype).reshape([int(size) for size in weight.shape])


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times the transposed weight plus bias, [..., N] in x's dtype: dequantize to x's dtype, then torch."""
    return functional.linear(x, dequantize(weight, x.dtype), bias)


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

    tile: where not 0, tile_activations() of all these tokens.
    """
    gate, up = gate_up.chunk(2, -1)
    activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    out = activated * up
    return tile_activations(out.reshape(-1, out.shape[-1]), tile) if tile else out


def tiles_shape(tokens: int, k: int, tile: int) -> tuple[int, int, int, int]:
    """The shape of the tiled activations of x [tokens, k]: [ceil(tokens / tile), ceil(k / 256) * 4, tile, 64]."""
    return -(-tokens // tile), -(-k // 256) * 4, tile, 64


def tile_activations(x: Tensor, tile: int) -> Tensor:
    """x [tokens, K] of a 16-bit type in the order of linear_wgmma's shared memory: tiles, see tiles_shape().

    A tile holds 64 k of `tile` tokens: word j * 8 + c of a token's 32 (two k each) is word j of the token's 16-byte chunk
    c ^ (token % 8). What is beyond tokens and K is zeros.
    """
    tokens, k = x.shape
    shape = tiles, blocks, _, _ = tiles_shape(tokens, k, tile)
    padded = x.new_zeros(tiles * tile, blocks * 64)
    padded[:tokens, :k] = x
    words = padded.view(tiles, tile, blocks, 4, 8, 2).permute(0, 2, 1, 4, 3, 5)
    return words.gather(3, _chunks(words)).reshape(shape)


def untile_activations(tiles: Tensor, tokens: int, k: int) -> Tensor:
    """x [tokens, k] of which tiles is tile_activations()."""
    count, blocks, tile, _ = tiles.shape
    words = tiles.view(count, blocks, tile, 8, 4, 2)
    words = words.gather(3, _chunks(words)).permute(0, 2, 1, 4, 3, 5)
    return words.reshape(count * tile, blocks * 64)[:tokens, :k]


def _chunks(words: Tensor) -> Tensor:
    """For words [tiles, blocks, token, chunk, 4, 2]: which chunk of the token lies at each place; its own inverse."""
    token, chunk = torch.arange(words.shape[2], device=words.device), torch.arange(8, device=words.device)
    return (chunk ^ token[:, None] % 8)[None, None, :, :, None, None].expand(words.shape)
