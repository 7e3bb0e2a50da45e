"""A dense feed-forward part and a mixture of experts over the same hidden states, each with norms of its own (Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nf4_kernels.cuda.routing import route
from server.engine.runtime.layers.experts import ModuleRouter, Router, SoftmaxRouter
from server.engine.runtime.layers.mlp import GatedMlp, Mlp
from server.engine.runtime.layers.norm import Norm, RmsNorm, read_norm
from server.engine.runtime.layers.projection import Projection, projection_of

NAMES = (
    "router",
    "experts",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
"""Modules of a layer that make a mixture of experts next to its dense part."""


@dataclass(frozen=True)
class ProjectedRouter:
    """SoftmaxRouter with normalised weights whose logits another launch computes, of a projection in NF4."""

    projection: Projection
    top_k: int

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route(self.projection(x), self.top_k, True, torch.float32)


@dataclass(frozen=True)
class ScaledRouter:
    """A router over normalised hidden states, whose weights are multiplied by a factor of each expert."""

    norm: RmsNorm
    router: SoftmaxRouter | ProjectedRouter
    factors: torch.Tensor
    """[experts]"""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = self.router(self.norm(x))
        return weights * self.factors[experts], experts


@dataclass(frozen=True)
class ParallelExperts:
    """after_dense(dense(norm(x))) + after(experts(before(x)))."""

    dense: GatedMlp | Mlp
    after_dense: Norm
    router: Router
    """Of x."""
    before: Norm
    experts: nn.Module
    """As of Experts; the sum over all ranks."""
    after: Norm

    def __call__(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None) -> torch.Tensor:
        """residual + the result, x [T, width]."""
        y = self.dense(x, norm, None)
        weights, experts = self.router(x)
        y = self.after_dense(y, self.after(self.experts(self.before(x), experts, weights)))
        return y if residual is None else residual + y


def read_parallel_experts(dense: GatedMlp | Mlp, children: Mapping[str, nn.Module]) -> ParallelExperts:
    """The feed-forward part of a layer that has NAMES among its children and a dense part."""
    router, experts, after_dense, before, after = (children[name] for name in NAMES)
    norms = [read_norm(norm) for norm in (after_dense, before, after)]
    return ParallelExperts(dense, norms[0], _read_router(router), norms[1], experts, norms[2])


@torch.inference_mode()
def _read_router(module: Any) -> Router:
    """The ScaledRouter that a module is, found by what it gives for random input; else its own code."""
    own = ModuleRouter(module)
    proj, scale, factors = (getattr(module, name, None) for name in ("proj", "scale", "per_expert_scale"))
    root, eps = getattr(module, "scalar_root_size", None), getattr(module, "eps", None)
    if not isinstance(proj, nn.Module) or not isinstance(scale, torch.Tensor) or not isinstance(factors, torch.Tensor):
        return own
    if not isinstance(root, float) or not isinstance(eps, float):
        return own
    random = torch.Generator(device="cpu").manual_seed(scale.shape[0])
    x = torch.randn(8, scale.shape[0], generator=random).to(scale)
    weights, experts = own(x)
    norm, top_k = RmsNorm((scale.float() * root).to(scale.dtype), eps, 0.0), experts.shape[-1]
    router: SoftmaxRouter | ProjectedRouter
    if type(proj) is nn.Linear and proj.bias is None:
        router = SoftmaxRouter(proj.weight.detach().contiguous(), top_k, True, torch.float32)
    else:
        router = ProjectedRouter(projection_of(proj), top_k)
    candidate = ScaledRouter(norm, router, factors.detach().float())
    found, chosen = candidate(x)
    # Of logits that rounding makes equal another one may be chosen.
    same = float((chosen.long() == experts.long()).float().mean()) > 0.9
    close = torch.isclose(found.sort(-1)[0].float(), weights.sort(-1)[0].float(), rtol=0.05, atol=1e-3)
    return candidate if same and float(close.float().mean()) > 0.9 else own
