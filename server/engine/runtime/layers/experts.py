"""Mixtures of experts as the feed-forward part of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from nf4_kernels.cuda.routing import route, route_linear
from server.engine.runtime import exchange
from server.engine.runtime.layers.mlp import GatedMlp, Mlp
from server.engine.runtime.layers.norm import Norm
from server.engine.runtime.layers.parts import UnknownLayerError
from server.engine.runtime.layers.projection import Projection

Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""x [T, width] to the routing weights and the experts of each token, both [T, top_k]."""


@dataclass(frozen=True)
class Experts:
    """The weighted sum of each token's experts, and of an expert that all tokens share."""

    router: Router
    experts: nn.Module
    """[T, width], experts and weights to [T, width], as checkpoint.experts.NF4Experts."""
    shared: GatedMlp | Mlp | None = None
    shared_gate: nn.Module | None = None
    """[T, width] to [T, 1]: the shared expert's result is multiplied by its sigmoid."""
    is_partial: bool = False
    """Whether the result is this rank's part of a sum."""
    latent: tuple[Projection, Projection] | None = None
    """From the width to that of the experts, and back (Nemotron 3 Super)."""
    is_mean: bool = False
    """Whether the result is the mean of the two, rather than their sum (Command A+)."""

    def __call__(self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None) -> torch.Tensor:
        """residual + the result for norm(x), x [T, width]."""
        x = x if norm is None else norm(x)
        weights, experts = self.router(x)
        if self.latent is None:
            y: torch.Tensor = self.experts(x, experts, weights)
        else:
            y = self.latent[1](self.experts(self.latent[0](x), experts, weights))
        if self.shared is not None and self.shared_gate is None and not self.is_mean and not self.is_partial:
            # The shared expert's last launch adds the residual.
            z = self.shared(x, None, residual)
            return _sum(z, y)
        if self.shared is not None:
            z = self.shared(x, None, None)
            gate = self.shared_gate
            if x.is_cuda and type(gate) is nn.Linear and gate.bias is None and not self.is_mean:
                # Triton is not installed without CUDA.
                from server.engine.runtime.layers.kernels import add_gated

                y = add_gated(x, gate.weight, z, y, None if self.is_partial else residual)
                if not self.is_partial:
                    return y
            else:
                y = y + (z if gate is None else torch.sigmoid(gate(x)) * z)
            if self.is_mean:
                y = y / 2
        if not self.is_partial:
            return y if residual is None else _sum(residual, y)
        return exchange.all_reduce(y, residual)


def _sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda:
        return x + y
    # Triton is not installed without CUDA.
    from server.engine.runtime.layers.kernels import add

    return add(x, y)


@dataclass(frozen=True)
class SoftmaxRouter:
    """The top_k greatest of softmax(x @ weight.T + bias), divided by their sum if normalised: one launch for few tokens.

    Normalised they are the softmax of the greatest logits alone, as gpt-oss has it.
    """

    weight: torch.Tensor
    """[experts, width], contiguous."""
    top_k: int
    normalised: bool
    rounded: torch.dtype
    """The dtype to which weights are rounded."""
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.bias is not None:
            logits = nn.functional.linear(x, self.weight, self.bias)
            return route(logits, self.top_k, self.normalised, self.rounded)
        if x.dtype != self.weight.dtype:
            # Some classes keep the weight of their router in float32, and compute in it.
            return _route(x, self.weight, None, self.top_k, self.normalised)
        return route_linear(x, self.weight, self.top_k, self.normalised, self.rounded)


@dataclass(frozen=True)
class SigmoidRouter:
    """The top_k greatest of sigmoid(x @ weight.T) + bias, weighted by these sigmoids, all in float32.

    The weights are divided by their sum if normalised, and multiplied by a factor (DeepSeek V3 with one group of experts,
    GLM-4.5 and their like).
    """

    weight: torch.Tensor
    """[experts, width], contiguous."""
    bias: torch.Tensor
    """[experts]: it is in the choice only."""
    top_k: int
    normalised: bool
    factor: float = 1.0

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _route(x, self.weight, self.bias, self.top_k, self.normalised, self.factor)


def _route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    normalised: bool,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute SigmoidRouter's result; without a bias SoftmaxRouter's, in float32."""
    if x.is_cuda:
        # Triton is not installed without CUDA.
        from server.engine.runtime.layers import router_kernels

        return router_kernels.route(x, weight, bias, top_k, normalised, factor)
    logits = nn.functional.linear(x.float(), weight.float())
    scores = logits.softmax(-1) if bias is None else logits.sigmoid()
    experts = (scores if bias is None else scores + bias).topk(top_k, sorted=False)[1]
    weights = scores.gather(-1, experts)
    if normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * factor, experts


class ModuleRouter:
    """A router by transformers' own code."""

    def __init__(self, module: nn.Module, *others: torch.Tensor) -> None:
        """others: what the module takes after x."""
        self._module = module
        self._others = others
        self._wants_batch = False

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._wants_batch:
            try:
                _, weights, experts = self._module(x, *self._others)
            except ValueError:
                # Trinity's unpacks three dimensions.
                self._wants_batch = True
        if self._wants_batch:
            _, weights, experts = self._module(x.unsqueeze(0), *self._others)
        return weights, experts


@torch.inference_mode()
def read_router(module: nn.Module, expert_bias: torch.Tensor | None = None) -> Router:
    """The router that a module is, found by what it gives for random input; else its own code.

    expert_bias: what it takes after x, if that is not a part of it. Raises UnknownLayerError.
    """
    if expert_bias is not None:
        return ModuleRouter(module, expert_bias)
    weight, bias, top_k = (getattr(module, name, None) for name in ("weight", "bias", "top_k"))
    own = ModuleRouter(module)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not isinstance(top_k, int):
        return own
    correction = getattr(module, "e_score_correction_bias", None)
    random = torch.Generator(device="cpu").manual_seed(top_k)
    # Of few choices most may be the same by chance if the class divides its experts into groups first.
    x = torch.randn(64 if isinstance(correction, torch.Tensor) else 8, weight.shape[1], generator=random).to(weight)
    try:
        weights, experts = own(x)
    except ValueError as e:  # Llama 4's gives factors of the experts' inputs
        raise UnknownLayerError(f"{type(module).__name__} does not give weights and experts") from e
    if top_k < 2:
        return own
    if isinstance(correction, torch.Tensor) and bias is None:
        return _sigmoid_router(weight, correction, x, weights, experts) or own
    for normalised in (True, False):
        candidate = SoftmaxRouter(weight, top_k, normalised, weights.dtype, bias)
        found, chosen = candidate(x)
        # Of equal logits another one may be chosen.
        same = float((chosen.long() == experts.long()).float().mean()) > 0.9
        if same and _are_close(found, weights):
            return candidate
    return own


def _sigmoid_router(
    weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
) -> SigmoidRouter | None:
    """The router that gives these weights and experts for x, if one does. The factor is found from them."""
    for normalised in (True, False):
        candidate = SigmoidRouter(weight, bias, experts.shape[-1], normalised)
        found, chosen = candidate(x)
        same = (chosen.long().sort(-1)[0] == experts.long().sort(-1)[0]).all(-1)
        factor = float(weights[same].sum() / found[same].sum())
        if float(same.float().mean()) > 0.95 and _are_close(found[same] * factor, weights[same]):
            return replace(candidate, factor=factor)
    return None


def _are_close(found: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether routing weights are equal but for rounding, in any order."""
    return torch.allclose(found.sort(-1)[0].float(), weights.sort(-1)[0].float(), rtol=0.02, atol=1e-3)
