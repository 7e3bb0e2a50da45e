"""Latent attention (MLA): keys and values of all heads as two matrices for each head over one latent vector of a token.

A head's key is its key matrix times the latent, followed by rotary columns that all heads share. Its value is its value
matrix times the latent. So attention needs no keys and values (the absorbed form): a query times the key matrix is a query
over latents, and the value matrix is applied to the weighted sum of latents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

Project = Callable[[torch.Tensor], torch.Tensor]
"""Both matrices of all heads as one GEMM: [tokens, heads * (plain + width)] of latents [tokens, rank]."""

_MAX_EXPANDED = 2**26
"""Numbers of keys and values that are expanded at a time."""
_MAX_TOKENS = 48
"""Tokens up to which a launch of ours on CUDA multiplies by heads' matrices; for more torch.bmm() is faster."""


@dataclass(frozen=True)
class HeadSizes:
    """Of a layer's matrices."""

    heads: int
    plain: int
    """Columns of a key without its rotary ones."""
    width: int
    """Columns of a value."""
    rank: int
    """Columns of a latent without the rotary ones."""


class LatentHeads(ABC):
    """The matrices of a layer's heads."""

    def __init__(self, sizes: HeadSizes, project: Project) -> None:
        self.sizes = sizes
        self.project = project

    @abstractmethod
    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Queries over latents [T, heads, rank + rotary] of queries [T, heads, plain + rotary]."""

    @abstractmethod
    def values_of(self, sums: torch.Tensor) -> torch.Tensor:
        """Results of heads [T, heads, width] of weighted sums of latents [T, heads, rank]."""

    def expanded(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [tokens, heads, plain + rotary] and values [tokens, heads, width] of latents [tokens, rank + rotary].

        Values of one head and the next have as many elements between them as of one token's last head and the next token's.
        """
        sizes, rotary = self.sizes, latent[:, None, self.sizes.rank :]
        plain, values = (
            self.project(latent[:, : sizes.rank]).unflatten(-1, (sizes.heads, -1)).split([sizes.plain, sizes.width], -1)
        )
        return torch.cat((plain, rotary.expand(-1, sizes.heads, -1)), -1), values

    def expands(self, length: int, end: int) -> bool:
        """Whether a chunk of that many tokens, the last of `end`, takes fewer operations with expanded keys and values."""
        sizes = self.sizes
        both = sizes.plain + sizes.width
        if end * sizes.heads * both > _MAX_EXPANDED:
            return False
        pairs = length * (end - length) + length * (length + 1) // 2
        # Rotary columns are the same in both forms.
        return pairs * both + end * sizes.rank * both < pairs * 2 * sizes.rank + length * sizes.rank * both


class DenseHeads(LatentHeads):
    """Matrices in the dtype of the activations."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, sizes: HeadSizes, project: Project) -> None:
        """key: [heads, plain, rank]. value: [heads, rank, width]."""
        super().__init__(sizes, project)
        self._key, self._value = key, value

    @classmethod
    def of(cls, weight: torch.Tensor, sizes: HeadSizes, project: Project) -> DenseHeads:
        """The matrices in a weight [heads * (plain + width), rank], each head's key rows before its value rows."""
        key, value = weight.unflatten(0, (sizes.heads, -1)).split([sizes.plain, sizes.width], 1)
        return cls(key, value.transpose(1, 2), sizes, project)

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        plain, rank = self.sizes.plain, self.sizes.rank
        rotary = query.shape[2] - plain
        if _is_small(query):
            from server.engine.runtime.attention.kernels.head_matrices import multiply_heads

            return multiply_heads(query, self._key, rotary)
        out = query.new_empty(*query.shape[:2], rank + rotary)
        torch.bmm(query[..., :plain].transpose(0, 1), self._key, out=out[..., :rank].transpose(0, 1))
        out[..., rank:] = query[..., plain:]
        return out

    def values_of(self, sums: torch.Tensor) -> torch.Tensor:
        if _is_small(sums):
            from server.engine.runtime.attention.kernels.head_matrices import multiply_heads

            return multiply_heads(sums, self._value)
        out = sums.new_empty(*sums.shape[:2], self.sizes.width)
        torch.bmm(sums.transpose(0, 1), self._value, out=out.transpose(0, 1))
        return out


def _is_small(x: torch.Tensor) -> bool:
    """Whether a launch of ours multiplies x; Triton is not installed without CUDA."""
    return x.is_cuda and x.shape[0] <= _MAX_TOKENS and x.dtype in (torch.bfloat16, torch.float16)
