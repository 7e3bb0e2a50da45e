"""The feed-forward parts of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from server.engine.runtime import pointwise
from server.engine.runtime.layers.norm import Norm
from server.engine.runtime.layers.projection import JoinedProjection, Nf4Projection, Projection

IN_LAUNCH = ("silu", "gelu_tanh")
"""Activations that GEMMs have in their epilogue."""


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate x) * up x)."""

    gate_up: Projection | JoinedProjection
    """One GEMM of gates and then as many ups, or two."""
    down: Projection
    activation: str | None
    """One of IN_LAUNCH; None: function computes it."""
    function: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None) -> torch.Tensor:
        """residual + the result for norm(x), x [T, width]."""
        tokens, gemm = x.shape[0], self.gate_up
        if self.activation is not None and isinstance(gemm, Nf4Projection) and gemm.gates(tokens, x.dtype, norm):
            tile = self.down.tile(tokens, x.dtype)
            inner = gemm.gated(x, norm, self.activation, tile)
            return self.down.of_tiles(inner, tokens, residual) if tile else self.down(inner, residual=residual)
        return self.down(self._activated(x, norm), residual=residual)

    def _activated(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if isinstance(self.gate_up, JoinedProjection):
            gate, up = self.gate_up(x, norm)
            return self.function(gate) * up
        gate_up = self.gate_up(x, norm)
        if self.activation is not None and pointwise.computes(gate_up):
            out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
            pointwise.gate(gate_up, self.activation, out).make()
            return out
        if self.activation is None or not gate_up.is_cuda:
            gate, up = gate_up.chunk(2, -1)
            return self.function(gate) * up
        # Triton is not installed without CUDA.
        from server.engine.runtime.layers.kernels import gated

        return gated(gate_up, self.activation)


@dataclass(frozen=True)
class Mlp:
    """down(activation(up x))."""

    up: Projection
    down: Projection
    function: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None) -> torch.Tensor:
        """residual + the result for norm(x), x [T, width]."""
        return self.down(self.function(self.up(x, norm)), residual=residual)


@torch.inference_mode()
def read_activation(function: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """The one of IN_LAUNCH that a function computes; None: another one."""
    x = torch.linspace(-6, 6, 101)
    known = {"silu": nn.functional.silu(x), "gelu_tanh": nn.functional.gelu(x, approximate="tanh")}
    if isinstance(function, nn.Module) and list(function.parameters()):
        return None
    found = function(x)
    return next((name for name, y in known.items() if torch.allclose(found, y, atol=1e-6)), None)
