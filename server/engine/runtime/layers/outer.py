"""Parts of a decoder that are computed once for all layers: rotary angles, and the norm after the last layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from server.engine.runtime.layers.norm import RmsNorm, read_rms_norm

# Types of rotary embeddings whose frequencies do not depend on how long a sequence is.
_FIXED = ("default", "linear", "llama3", "yarn", "proportional")


def write_norm(norm: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A forward for a norm's module, [..., width] to the same; None if it is no RMS norm."""
    rms = read_rms_norm(norm)
    if rms is None:
        return None
    found: RmsNorm = rms

    def forward(x: torch.Tensor) -> torch.Tensor:
        return found(x.reshape(-1, x.shape[-1])).view(x.shape)

    return forward


def fixed_frequencies(module: nn.Module) -> tuple[torch.Tensor, float] | None:
    """A rotary embedding's frequencies, float32 [half], and what it multiplies by; None where positions change them."""
    frequencies = getattr(module, "inv_freq", None)
    kind, scaling = getattr(module, "rope_type", None), getattr(module, "attention_scaling", None)
    if not isinstance(frequencies, torch.Tensor) or kind not in _FIXED or not isinstance(scaling, int | float):
        return None
    if frequencies.dim() != 1 or frequencies.dtype != torch.float32:
        return None
    return frequencies, float(scaling)


def write_rotary(module: nn.Module, has_axes: bool = True) -> Callable[..., Any] | None:
    """A forward for a rotary embedding's module, one launch on CUDA; None if it has another form.

    has_axes: whether positions of several axes may differ, as images make them do. Those of a text are one row, expanded.
    """
    found, own = fixed_frequencies(module), module.forward
    if found is None:
        return None
    frequencies, scaling = found
    joins = False

    def forward(x: torch.Tensor, position_ids: torch.Tensor, *others: Any, **named: Any) -> Any:
        if joins and position_ids.dim() == 3 and (not has_axes or position_ids.stride(0) == 0):
            position_ids = position_ids[0]
        if others or named or position_ids.dim() != 2:
            return own(x, position_ids, *others, **named)
        cos, sin = _angles(position_ids.reshape(-1), frequencies, scaling, x.dtype)
        return cos.view(*position_ids.shape, -1), sin.view(*position_ids.shape, -1)

    positions = torch.tensor([[0, 1, 77, 4095, 131071]], device=frequencies.device)
    example = torch.empty(0, dtype=torch.float32, device=frequencies.device)
    plain = _own_angles(own, example, positions)
    joined = _own_angles(own, example, positions.expand(3, *positions.shape))
    expected = joined if plain is None else plain
    if expected is None:  # it takes more than that
        return None
    computed = forward(example, positions)
    # Others keep the axes apart, for attention to join.
    joins = joined is not None and all(a.shape == b.shape for a, b in zip(joined, computed, strict=True))
    same = all(a.shape == b.shape and torch.allclose(a, b, atol=2e-5) for a, b in zip(computed, expected, strict=True))
    return forward if same else None


def _own_angles(
    own: Callable[..., Any], example: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A rotary embedding's cos and sin for positions; None if it takes others, with axes or without."""
    try:
        cos, sin = own(example, positions)
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None
    return cos, sin


def _angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, 2 half] of positions int64 [T], in dtype."""
    if positions.is_cuda:
        # Triton is not installed without CUDA.
        from server.engine.runtime.layers.kernels import angles

        return angles(positions, frequencies, scaling, dtype)
    products = (positions[:, None].float() * frequencies).repeat(1, 2)
    return (products.cos() * scaling).to(dtype), (products.sin() * scaling).to(dtype)
