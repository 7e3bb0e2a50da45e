"""Rotation of heads as a product of complex numbers."""

from __future__ import annotations

import torch

from server.engine.runtime.attention.rotation import Rotation


def rotated(x: torch.Tensor, rotation: Rotation, which: int) -> torch.Tensor:
    """Queries (which = 0) or keys (1) [T, heads, dim] normalised and rotated, in float64."""
    wide = x.double()
    if rotation.norms is not None:
        scale = (wide.square().mean(-1, keepdim=True) + rotation.eps).rsqrt()
        wide = wide * scale * (rotation.norms[which].double() + rotation.offset)
    half = x.shape[-1] // 2
    pairs = torch.complex(wide[..., :half], wide[..., half:])
    turned = pairs * torch.complex(rotation.cos.double(), rotation.sin.double())[:, None, :half]
    return torch.cat((turned.real, turned.imag), -1)
