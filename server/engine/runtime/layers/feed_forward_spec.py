"""Rules that read the feed-forward part of a decoder layer from transformers' module of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from server.engine.runtime.layers.decoder import FeedForward
from server.engine.runtime.layers.experts import Experts, read_router
from server.engine.runtime.layers.mlp import GatedMlp, Mlp, read_activation
from server.engine.runtime.layers.parts import UnknownLayerError, children_of
from server.engine.runtime.layers.projection import joined, projection_of
from server.engine.runtime.model.exchanged_experts import ReducedBlock, ReducedExperts

_MLPS = (("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"), ("input_linear", "output_linear"))
_BIASES = ("expert_bias", "e_score_correction_bias")
_ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")


def read_feed_forward(module: nn.Module) -> FeedForward:
    if isinstance(module, ReducedBlock):
        return _read_experts(module.block, is_partial=True)
    if any(name == "experts" for name, _ in module.named_children()):
        return _read_experts(module, is_partial=False)
    return _read_dense(module)


def with_shared(mlp: FeedForward, module: nn.Module) -> Experts:
    """Experts with the expert that all tokens share, which the layer has next to them (Granite)."""
    shared = _read_dense(module)
    if not isinstance(mlp, Experts) or not isinstance(shared, GatedMlp) or mlp.shared is not None or mlp.is_partial:
        raise UnknownLayerError(f"{type(module).__name__} next to a feed-forward part of another kind")
    return replace(mlp, shared=shared)


def _read_dense(module: nn.Module) -> GatedMlp | Mlp:
    function: Any = next((getattr(module, name) for name in _ACTIVATIONS if hasattr(module, name)), None)
    children = dict(children_of(module, ()))
    if set(children) == {"w1", "w2", "w3"} and function is None:
        # Nothing but the layer's own code says which activation it is.
        both = joined([children["w1"], children["w3"]])
        return GatedMlp(both.alone or both, projection_of(children["w2"]), "silu", nn.functional.silu)
    up_name, down_name = next((names for names in _MLPS if names[1] in children), _MLPS[0])
    if down_name not in children:
        raise UnknownLayerError(f"{type(module).__name__} has {', '.join(children)}")
    down = projection_of(children.pop(down_name))
    projections = {name: child for name, child in children.items() if child is not function}
    if not callable(function):
        raise UnknownLayerError(f"{type(module).__name__} has no activation")
    activation, multiplier = read_activation(function), float(getattr(module, "gate_multiplier", 1.0))
    if multiplier != 1.0:
        activation, function = None, _multiplied(function, multiplier)
    if set(projections) in ({"gate_up_proj"}, {"input_linear"}):
        return GatedMlp(projection_of(*projections.values()), down, activation, function)
    if set(projections) == {"gate_proj", "up_proj"}:
        both = joined([projections["gate_proj"], projections["up_proj"]])
        return GatedMlp(both.alone or both, down, activation, function)
    if set(projections) == {up_name}:
        return Mlp(projection_of(projections[up_name]), down, function)
    raise UnknownLayerError(f"{type(module).__name__} has {', '.join(children)}")


def _multiplied(function: Callable[[torch.Tensor], torch.Tensor], multiplier: float) -> Any:
    return lambda gate: function(gate * multiplier)


def _read_experts(module: nn.Module, is_partial: bool) -> Experts:
    children = dict(children_of(module, ("experts",)))
    experts, router = children.pop("experts"), children.pop("gate", children.pop("router", None))
    shared = children.pop("shared_experts", children.pop("shared_expert", None))
    gate = children.pop("shared_expert_gate", None)
    latent = [projection_of(children.pop(name)) for name in ("fc1_latent_proj", "fc2_latent_proj") if name in children]
    if router is None or children:
        raise UnknownLayerError(f"{type(module).__name__} has {', '.join(['experts', *children])}")
    dense = None if shared is None else _read_dense(shared)
    if isinstance(experts, ReducedExperts) and dense is None:
        # The launch that sums the ranks' results adds the residual, too.
        experts, is_partial = experts.experts, True
    bias: torch.Tensor | None = next((getattr(module, name) for name in _BIASES if hasattr(module, name)), None)
    both = (latent[0], latent[1]) if len(latent) == 2 else None
    is_mean = getattr(module, "shared_expert_combination_strategy", "sum") == "average"
    return Experts(read_router(router, bias), experts, dense, gate, is_partial, both, is_mean)
