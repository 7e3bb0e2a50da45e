"""GEMMs of a decoder layer, with the norm in front and the residual behind in their launches where these have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from nf4_kernels import ops
from server.engine.runtime import exchange
from server.engine.runtime.layers.norm import Norm, RmsNorm
from server.engine.runtime.model.exchanged import ReducedLinear
from server.engine.runtime.model.projections import GroupMember, NF4Linear


class Projection(Protocol):
    """One GEMM: residual + x times a weight [n, k]."""

    def __call__(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        """residual [T, n] + the GEMM of norm(x), x [T, k]. The residual may be overwritten."""
        ...

    def tile(self, tokens: int, dtype: torch.dtype) -> int:
        """The token tile in which the launch in front may write x for of_tiles(); 0: x must be [T, k]."""
        ...

    def of_tiles(self, tiles: torch.Tensor, tokens: int, residual: torch.Tensor | None) -> torch.Tensor:
        """residual + the GEMM of x in tiled activations (ops.tiled_linear())."""
        ...


def projection_of(module: nn.Module) -> Projection:
    """The projection that a module computes, in its final form: in NF4, of a shard, with adapters or in 16 bits."""
    if isinstance(module, ReducedLinear):
        return ReducedProjection(projection_of(module.linear))
    if isinstance(module, NF4Linear) and module.table == "nf4":
        return Nf4Projection(module)
    return ModuleProjection(module)


class ModuleProjection:
    """A projection by its module's own code."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.module(x if norm is None else norm(x))
        return y if residual is None else residual + y

    def tile(self, tokens: int, dtype: torch.dtype) -> int:
        return 0

    def of_tiles(self, tiles: torch.Tensor, tokens: int, residual: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError(f"{type(self.module).__name__} reads no tiles")


class ReducedProjection:
    """A projection of which each rank has a part of k. The ranks' sum adds the residual."""

    def __init__(self, part: Projection) -> None:
        self._part = part

    def __call__(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        return exchange.all_reduce(self._part(x, norm), residual)

    def tile(self, tokens: int, dtype: torch.dtype) -> int:
        return self._part.tile(tokens, dtype)

    def of_tiles(self, tiles: torch.Tensor, tokens: int, residual: torch.Tensor | None) -> torch.Tensor:
        return exchange.all_reduce(self._part.of_tiles(tiles, tokens, None), residual)


class Nf4Projection:
    """A GEMM with an NF4 weight, by its codes or by the dequantized copy where cuBLAS is faster."""

    def __init__(self, linear: NF4Linear) -> None:
        self.linear = linear
        # By tokens and norm, because a plan takes Python longer than a launch.
        self._fuses: dict[tuple[int, bool], bool] = {}
        self._gates: dict[tuple[int, bool], bool] = {}
        self._tiles: dict[int, int] = {}

    def __call__(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        linear, tokens = self.linear, x.shape[0]
        if linear.uses_copy(tokens):
            return _by_copy(linear, x if norm is None else norm(x), residual)
        x, weight, eps = self._normalised(x, norm)
        return ops.fused_linear(x, linear.weight, linear.bias, residual, weight, eps)

    def gated(self, x: torch.Tensor, norm: Norm | None, activation: str, tile: int) -> torch.Tensor:
        """ops.gated_linear() of norm(x): [T, n / 2], or tiled activations with a tile. Where gates() says so."""
        x, weight, eps = self._normalised(x, norm)
        return ops.gated_linear(x, self.linear.weight, self.linear.bias, weight, eps, activation, tile)

    def gates(self, tokens: int, dtype: torch.dtype, norm: Norm | None) -> bool:
        """Whether the GEMM's launches compute a gated activation for that many tokens, with the norm if they can."""
        if self.linear.uses_copy(tokens):
            return False
        key = tokens, self._fuses_norm(tokens, dtype, norm)
        if key not in self._gates:
            self._gates[key] = ops.can_gate(*self.linear.planned(tokens, dtype), key[1])
        return self._gates[key]

    def tile(self, tokens: int, dtype: torch.dtype) -> int:
        if self.linear.uses_copy(tokens) or self.linear.in_features % 256:
            return 0
        if tokens not in self._tiles:
            self._tiles[tokens] = ops.token_tile(*self.linear.planned(tokens, dtype))
        return self._tiles[tokens]

    def of_tiles(self, tiles: torch.Tensor, tokens: int, residual: torch.Tensor | None) -> torch.Tensor:
        return ops.tiled_linear(tiles, self.linear.weight, tokens, self.linear.bias, residual)

    def _normalised(self, x: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor | None, float]:
        """x and the norm that is left to the GEMM: its weight and eps."""
        if norm is None:
            return x, None, 0.0
        if self._fuses_norm(x.shape[0], x.dtype, norm) and isinstance(norm, RmsNorm):
            return x, norm.weight, norm.eps
        return norm(x), None, 0.0

    def _fuses_norm(self, tokens: int, dtype: torch.dtype, norm: Norm | None) -> bool:
        if norm is None or not norm.in_launch:
            return False
        key = tokens, True
        if key not in self._fuses:
            self._fuses[key] = ops.can_fuse(*self.linear.planned(tokens, dtype), True)
        return self._fuses[key]


def _by_copy(linear: NF4Linear, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """residual + the GEMM with the dequantized copy, by cuBLAS, which adds the residual in float32."""
    copy, bias = linear.expanded, linear.bias
    assert copy is not None
    if residual is None:
        return nn.functional.linear(x, copy, bias)
    if bias is not None:
        residual += bias
    return residual.addmm_(x, copy.t())


class JoinedProjection:
    """Projections of one input as one GEMM, or as several that share a norm."""

    def __init__(self, projections: Sequence[Projection], sizes: Sequence[int]) -> None:
        """sizes: the columns of each result, all of one GEMM's if there is one projection."""
        self.projections = list(projections)
        """One GEMM for all results, or one for each."""
        self.sizes = list(sizes)
        """Columns of each result of the one GEMM."""

    @property
    def alone(self) -> Projection | None:
        """The one GEMM that computes all; None if there are several."""
        return self.projections[0] if len(self.projections) == 1 else None

    def __call__(self, x: torch.Tensor, norm: Norm | None) -> list[torch.Tensor]:
        """Results [T, size] of norm(x), x [T, k]."""
        if len(self.projections) == 1:
            return list(self.projections[0](x, norm).split(self.sizes, -1))
        x = x if norm is None else norm(x)
        return [projection(x) for projection in self.projections]


def joined(modules: Sequence[nn.Module]) -> JoinedProjection:
    """The projections of modules that a layer applies to one input, which may be members of one GEMM's group."""
    first = modules[0]
    if isinstance(first, GroupMember) and first.linear is not None:
        return JoinedProjection([projection_of(first.linear)], first.sizes)
    return JoinedProjection([projection_of(module) for module in modules], [])
