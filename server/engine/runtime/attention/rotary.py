"""The rotary embedding of queries and keys, and the norm of their heads in front of it, where attention computes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nf4_kernels.cuda.decode_attention import Rotation
from server.engine.runtime import pointwise


@dataclass(frozen=True)
class RotaryEmbedding(Rotation):
    """First operations of attention on query [T, heads, dim] and key [T, kv_heads, dim], in float32 and rounded once.

    With norms, each head is divided by the root of its mean square and multiplied by a weight. Then element i of a head's
    first half and element i + dim / 2 are rotated together, which is Llama's pairing and that of nearly all models.
    """

    angle_step: int = 0
    """If not 0, the elements 2i and 2i + 1 are rotated together instead, by the angle in column angle_step * i. The launch
    that attends computes no such embedding."""

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """query and key, normalised and rotated: by one launch on CUDA, in place where C++ does it on CPU.

        The angles may be those of a head's first columns only; the others are not rotated.
        """
        norms = self.norms or (None, None)
        if not self.angle_step and pointwise.computes(query, key, self.cos, self.sin):
            for heads, weight in zip((query, key), norms, strict=True):
                pointwise.rotate(heads, self.cos, self.sin, weight, self.eps, self.offset).make()
            return query, key
        if not query.is_cuda:
            return self.apply(query, key)
        # Triton is not installed without CUDA.
        from server.engine.runtime.attention.kernels.rotate import rotate

        return rotate(self, query, key)

    def apply(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """query and key, normalised and rotated by torch's operations."""
        query_norm, key_norm = self.norms or (None, None)
        return self._apply(query, query_norm), self._apply(key, key_norm)

    def _apply(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        wide = x.float()
        if weight is not None:
            mean = wide.pow(2).mean(-1, keepdim=True)
            wide = wide * torch.rsqrt(mean + self.eps) * (weight.float() + self.offset)
        cos, sin = self.cos.float()[:, None], self.sin.float()[:, None]
        turned, rest = wide[..., : cos.shape[-1]], wide[..., cos.shape[-1] :]
        if self.angle_step:
            cos, sin = (angles[..., :: self.angle_step][..., : cos.shape[-1] // 2] for angles in (cos, sin))
            first, second = turned.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
            return torch.cat((turned, rest), -1).to(x.dtype)
        first, second = turned.chunk(2, -1)
        turned = turned * cos + torch.cat((-second, first), -1) * sin
        return torch.cat((turned, rest), -1).to(x.dtype)
