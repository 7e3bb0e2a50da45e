"""Norm and rotation of queries' and keys' heads, where they are left to the attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """What is done to query [T, heads, dim] and key [T, kv_heads, dim] before they attend, in float32, rounded once.

    With norms each head is first divided by the root of its mean square and multiplied by a weight. Then element i of its
    first half and element i + dim / 2 are rotated together (Llama's way, that of nearly all models).
    """

    cos: torch.Tensor
    """[T, dim], contiguous."""
    sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    """Queries' and keys' weights, each [dim], contiguous."""
    eps: float = 0.0
    """Added to mean squares."""
    offset: float = 0.0
    """Added to weights: 1 in Gemma."""

    def rotated(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """query and key normalised and rotated, by torch's operations."""
        query_norm, key_norm = self.norms or (None, None)
        return self._rotated(query, query_norm), self._rotated(key, key_norm)

    def _rotated(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        wide = x.float()
        if weight is not None:
            mean = wide.pow(2).mean(-1, keepdim=True)
            wide = wide * torch.rsqrt(mean + self.eps) * (weight.float() + self.offset)
        first, second = wide.chunk(2, -1)
        swapped = torch.cat((-second, first), -1)
        cos, sin = self.cos.float()[:, None], self.sin.float()[:, None]
        return (wide * cos + swapped * sin).to(x.dtype)
