"""Latent attention (MLA): keys and values of all heads as two matrices for each head over one latent vector of a token.

A head's key is its key matrix times the latent, followed by rotary columns that all heads share. Its value is its value
matrix times the latent. So attention needs no keys and values (the absorbed form): a query times the key matrix is a query
over latents, and the value matrix is applied to the weighted sum of latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [1, heads, tokens, dim] of latents [1, 1, tokens, rank] and rotary columns [1, 1, tokens, rotary]."""

_MAX_EXPANDED = 2**26
"""Numbers of keys and values that are expanded at a time."""


@dataclass(frozen=True)
class LatentHeads:
    """The matrices of a layer's heads, in the dtype of the activations."""

    key: torch.Tensor
    """[heads, plain, rank], where plain is the columns of a key without its rotary ones."""
    value: torch.Tensor
    """[heads, rank, value_dim]."""
    expand: Expand
    """The same as a GEMM over latents."""

    @classmethod
    def of(cls, weight: torch.Tensor, key_dim: int, value_dim: int, expand: Expand) -> LatentHeads:
        """The matrices in a weight [heads * (key_dim + value_dim), rank], each head's key rows before its value rows."""
        key, value = weight.unflatten(0, (-1, key_dim + value_dim)).split([key_dim, value_dim], 1)
        return cls(key.contiguous(), value.transpose(1, 2).contiguous(), expand)

    @property
    def rank(self) -> int:
        """Columns of a latent, without the rotary ones."""
        return self.key.shape[2]

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Queries over latents [T, heads, rank + rotary] of queries [T, heads, plain + rotary]."""
        plain = self.key.shape[1]
        out = query.new_empty(*query.shape[:2], self.rank + query.shape[2] - plain)
        torch.bmm(query[..., :plain].transpose(0, 1), self.key, out=out[..., : self.rank].transpose(0, 1))
        out[..., self.rank :] = query[..., plain:]
        return out

    def values_of(self, sums: torch.Tensor) -> torch.Tensor:
        """Results of heads [T, heads, value_dim] of weighted sums of latents [T, heads, rank]."""
        return torch.bmm(sums.transpose(0, 1), self.value).transpose(0, 1)

    def expanded(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [heads, tokens, plain + rotary] and values [heads, tokens, value_dim] of latents [tokens, rank + rotary]."""
        keys, values = self.expand(*latent[None, None].split([self.rank, latent.shape[1] - self.rank], -1))
        return keys[0], values[0]

    def expands(self, length: int, end: int) -> bool:
        """Whether a chunk of that many tokens, the last of `end`, takes fewer operations with expanded keys and values."""
        plain, (heads, rank, width) = self.key.shape[1], self.value.shape
        if end * heads * (plain + width) > _MAX_EXPANDED:
            return False
        pairs = length * (end - length) + length * (length + 1) // 2
        matrices = rank * (plain + width)
        # Rotary columns are the same in both forms.
        return pairs * (plain + width) + end * matrices < pairs * 2 * rank + length * matrices
