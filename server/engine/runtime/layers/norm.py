"""Norms of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from server.engine.runtime import pointwise
from server.engine.runtime.model.exchanged import ReducedNorm


class Norm(Protocol):
    """A norm of a decoder layer, before one of its parts or after it."""

    @property
    def in_launch(self) -> bool:
        """Whether a GEMM's own launches may compute it: ops.fused_linear() does so for RMS norms without an offset."""
        ...

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """residual + the norm of x, both [T, width] of one dtype."""
        ...


@dataclass(frozen=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), computed in float32 and rounded once."""

    weight: torch.Tensor
    """[width], contiguous, in the model's dtype."""
    eps: float
    offset: float
    """0 as in Llama, 1 as in Gemma."""

    @property
    def in_launch(self) -> bool:
        return self.offset == 0.0

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if x.is_cuda:
            # Triton is not installed without CUDA.
            from server.engine.runtime.layers.kernels import rms_norm

            return rms_norm(x, self.weight, self.eps, self.offset, residual)
        if pointwise.computes(x, self.weight):
            out = x.new_empty(x.shape)
            pointwise.norm(x, self.weight, self.eps, self.offset, out, residual).make()
            return out
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * (self.weight.float() + self.offset)
        return (wide if residual is None else wide + residual.float()).to(x.dtype)


class ModuleNorm:
    """A norm of another kind, such as LayerNorm, by its own module."""

    in_launch = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self._module(x)
        return y if residual is None else residual + y


def read_norm(module: nn.Module) -> Norm:
    """The RMS norm that a module computes on random input, else the module's own code."""
    return read_rms_norm(module) or ModuleNorm(module)


@torch.inference_mode()
def read_rms_norm(module: nn.Module, unscaled: torch.Tensor | None = None) -> RmsNorm | None:
    """The RMS norm that a module computes; None if it computes something else.

    unscaled: ones in the place of a weight, if the module has none.
    """
    weight, eps = getattr(module, "weight", unscaled), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if list(module.children()) or getattr(module, "bias", None) is not None or isinstance(module, ReducedNorm):
        return None
    random = torch.Generator(device="cpu").manual_seed(weight.shape[0])
    # A mean that is not zero tells a LayerNorm from an RMS norm, small rows tell where eps is added.
    x = (torch.randn(3, weight.shape[0], generator=random) + 0.5) * torch.tensor([[1.0], [30.0], [eps**0.5]])
    x = x.to(weight)
    found = module(x).float()
    for offset in (0.0, 1.0):
        wide = x.float()
        norm = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + offset)
        # Two roundings to the dtype, and the sum of squares in another order.
        if bool(((found - norm).abs() <= 4 * torch.finfo(weight.dtype).eps * norm.abs() + 1e-6).all()):
            return RmsNorm(weight.detach().contiguous(), eps, offset)
    return None
