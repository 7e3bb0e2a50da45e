"""The oracle of rotary embeddings: a multiplication of complex numbers, in float64."""

from __future__ import annotations

import torch

from server.engine.runtime.attention.rotary import RotaryEmbedding


def rotated(x: torch.Tensor, rotary: RotaryEmbedding, which: int) -> torch.Tensor:
    """Queries (which = 0) or keys (1) [T, heads, dim] normalised and rotated, in float64."""
    wide = x.double()
    if rotary.norms is not None:
        scale = (wide.square().mean(-1, keepdim=True) + rotary.eps).rsqrt()
        wide = wide * scale * (rotary.norms[which].double() + rotary.offset)
    half = x.shape[-1] // 2
    pairs = torch.complex(wide[..., :half], wide[..., half:])
    turned = pairs * torch.complex(rotary.cos.double(), rotary.sin.double())[:, None, :half]
    return torch.cat((turned.real, turned.imag), -1)
