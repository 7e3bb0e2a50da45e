"""The oracle: NF4 dequantize and linear in plain torch, on any device, for any shape. Every kernel is tested against it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nf4_kernels.format import TABLES, Weight, block_scales, check, unpack
from nf4_kernels.params import ACTIVATIONS, EXPERT_ACTIVATIONS

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
"""Constants of swiglu_oai (gpt-oss): where gates and ups are clamped, and how steep its sigmoid is."""


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight in dtype: float32 code times float32 scale, then one rounding. ValueError where tensors are too small."""
    count = check(weight)
    values = torch.tensor(TABLES[weight.table], dtype=torch.float32, device=weight.packed.device)[
        unpack(weight.packed, count)
    ]
    values *= block_scales(weight).repeat_interleave(weight.blocksize)[:count]
    return values.to(dtype).reshape([int(size) for size in weight.shape])


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times the transposed weight plus bias, [..., N] in x's dtype: dequantize to x's dtype, then torch."""
    return functional.linear(x, dequantize(weight, x.dtype), bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., K] / sqrt(mean(x^2) + eps), rounded, times weight [K]; it is computed in float32, as models do it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def check_gate(n: int, activation: str, tile: int) -> None:
    """Raise ValueError where gated() does not take n columns."""
    if activation not in ACTIVATIONS or n % 2 or tile < 0:
        given = f"{activation!r}, {n}, {tile}"
        raise ValueError(f"activation must be one of {tuple(ACTIVATIONS)}, N even and tile at least 0, got {given}")


def gated(gate_up: Tensor, activation: str, tile: int = 0) -> Tensor:
    """activation (params.EXPERT_ACTIVATIONS) of the first K columns of gate_up [..., 2 K], rounded, times the last K.

    swiglu_oai clamps gates from above and ups from both sides, and adds one to the ups.

    The result is [..., K], or with a tile other than 0 the tile_activations() of all these tokens.
    """
    gate, up = gate_up.chunk(2, -1)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
        activated = gate * torch.sigmoid(gate * SWIGLU_ALPHA)
    else:
        activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    out = activated * up
    return tile_activations(out.reshape(-1, out.shape[-1]), tile) if tile else out


def weighted_sum(out: Tensor, routing_weights: Tensor) -> Tensor:
    """Sum out [tokens, top_k, N] times routing_weights [tokens, top_k] over top_k in float32; gives out's dtype."""
    return (out.float() * routing_weights.unsqueeze(-1)).sum(1).to(out.dtype)


def check_expert_gate(n: int, activation: str) -> None:
    """Raise ValueError where moe_gated_linear() does not take experts of n rows."""
    if activation not in EXPERT_ACTIVATIONS or n % 2:
        raise ValueError(f"activation must be one of {tuple(EXPERT_ACTIVATIONS)} and N even, got {activation!r}, {n}")


def tiles_shape(tokens: int, k: int, tile: int) -> tuple[int, int, int, int]:
    """The shape of the tiled activations of x [tokens, k]: [ceil(tokens / tile), ceil(k / 256) * 4, tile, 64]."""
    return -(-tokens // tile), -(-k // 256) * 4, tile, 64


def tile_activations(x: Tensor, tile: int) -> Tensor:
    """x [tokens, K] of a 16-bit type in the order of linear_wgmma's shared memory: tiles, see tiles_shape().

    A tile holds 64 k of `tile` tokens: word j * 8 + c of a token's 32 (two k each) is word j of the token's 16-byte chunk
    c ^ (token % 8). Places beyond the tokens and beyond K hold zeros.
    """
    tokens, k = x.shape
    shape = tiles, blocks, _, _ = tiles_shape(tokens, k, tile)
    padded = x.new_zeros(tiles * tile, blocks * 64)
    padded[:tokens, :k] = x
    words = padded.view(tiles, tile, blocks, 4, 8, 2).permute(0, 2, 1, 4, 3, 5)
    return words.gather(3, _chunks(words)).reshape(shape)


def untile_activations(tiles: Tensor, tokens: int, k: int) -> Tensor:
    """The x [tokens, k] whose tile_activations() are tiles."""
    count, blocks, tile, _ = tiles.shape
    words = tiles.view(count, blocks, tile, 8, 4, 2)
    words = words.gather(3, _chunks(words)).permute(0, 2, 1, 4, 3, 5)
    return words.reshape(count * tile, blocks * 64)[:tokens, :k]


def _chunks(words: Tensor) -> Tensor:
    """Say which chunk of a token lies at each place of words [tiles, blocks, token, chunk, 4, 2]; its own inverse."""
    token, chunk = torch.arange(words.shape[2], device=words.device), torch.arange(8, device=words.device)
    return (chunk ^ token[:, None] % 8)[None, None, :, :, None, None].expand(words.shape)
