"""Rules that read the attention of a decoder layer from transformers' module of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.layers.attention import Attention
from server.engine.runtime.layers.norm import RmsNorm, read_norm, read_rms_norm
from server.engine.runtime.layers.parts import UnknownLayerError, children_of
from server.engine.runtime.layers.projection import JoinedProjection, joined, projection_of
from server.engine.runtime.layers.rotary_functions import angle_step, takes_angles_once
from server.engine.runtime.model.exchanged import ReducedNorm

_OUTPUTS = ("o_proj", "dense", "out_proj")
_HEAD_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm"))


def read_attention(
    module: nn.Module, index: int, options: AttentionOptions, is_rotary: bool, like: torch.Tensor | None = None
) -> Attention:
    """The attention that a module is. See read_layer(). like: a norm's weight of its layer."""
    head_dim = getattr(module, "head_dim", None)
    children = dict(children_of(module, ()))
    output_module = next((children.pop(name) for name in _OUTPUTS if name in children), None)
    if output_module is None:
        raise UnknownLayerError(f"{type(module).__name__} has {', '.join(children)}")
    output = projection_of(output_module)
    is_gated = False
    if not isinstance(head_dim, int):
        raise UnknownLayerError(f"{type(module).__name__} does not say how wide a head is")
    if "qkv_proj" in children:
        qkv = _fused_qkv(children.pop("qkv_proj"), module, head_dim)
    elif {"q_proj", "k_proj", "v_proj"} <= set(children):
        modules = [children.pop(name) for name in ("q_proj", "k_proj", "v_proj")]
        is_gated = getattr(modules[0], "out_features", None) == 2 * getattr(output_module, "in_features", 0)
        qkv = joined(modules)
    elif {"q_proj", "k_proj", "v_norm"} <= set(children):
        qkv = joined([children.pop(name) for name in ("q_proj", "k_proj")])
    else:
        raise UnknownLayerError(f"{type(module).__name__} has {', '.join(children)}")
    norms_last = "query_layernorm" in children
    names = next((names for names in _HEAD_NORMS if names[0] in children), _HEAD_NORMS[0])
    queries, keys = (children.pop(name, None) for name in names)
    values, gate, both = (children.pop(name, None) for name in ("v_norm", "gate_proj", "qk_norm"))
    if children or (queries is None) != (keys is None) or (both is not None and (queries is not None or like is None)):
        raise UnknownLayerError(f"{type(module).__name__} has {', '.join(children) or 'one norm for queries and keys'}")
    norms = {} if queries is None or keys is None else _qk_norms(queries, keys, head_dim)
    if both is not None and like is not None:
        factor = float(getattr(module, "qk_scale_factor", 1.0))
        norms = {"head_norms": _shared_norms(both, factor, torch.ones_like(like[:1]).repeat(head_dim))}
    return Attention(
        index,
        head_dim,
        qkv,
        output,
        options,
        is_rotary=is_rotary,
        is_gated=is_gated,
        gate=None if gate is None else projection_of(gate),
        angles_once=takes_angles_once(module),
        angle_step=angle_step(module),
        norms_last=norms_last,
        key_multiplier=float(getattr(module, "key_multiplier", 1.0)),
        value_norm=None if values is None else _value_norm(values, queries),
        **norms,
    )


def _qk_norms(queries: nn.Module, keys: nn.Module, head_dim: int) -> dict[str, Any]:
    """The arguments of Attention for its norms of queries and keys."""
    widths = [getattr(norm, "weight", torch.empty(0)).shape for norm in (queries, keys)]
    heads = read_rms_norm(queries), read_rms_norm(keys)
    alike = None not in heads and len({(norm.eps, norm.offset) for norm in heads if norm is not None}) == 1
    if alike and widths == [(head_dim,)] * 2:
        return {"head_norms": heads}
    of_ranks = isinstance(queries, ReducedNorm) and isinstance(keys, ReducedNorm)
    if of_ranks or all(width and width[0] > head_dim for width in widths):
        return {"row_norms": (read_norm(queries), read_norm(keys))}
    raise UnknownLayerError(f"norms of queries and keys of the kind {type(queries).__name__}")


def _shared_norms(norm: nn.Module, factor: float, ones: torch.Tensor) -> tuple[RmsNorm, RmsNorm]:
    """The norms of queries and of keys that one norm without weights is; queries are multiplied by factor after it.

    The factor is divided between both weights, so that in 16 bits their product differs less from it.
    """
    found = read_rms_norm(norm, ones)
    if found is None or not factor:
        raise UnknownLayerError(f"a norm of queries and keys of the kind {type(norm).__name__}")
    of_keys = torch.linspace(1, 2, 257).to(ones.dtype)
    of_queries = (factor / of_keys.float()).to(ones.dtype)
    best = int((of_queries.double() * of_keys.double() - factor).abs().argmin())
    weights = (float(of_queries[best]), float(of_keys[best]))
    return RmsNorm(ones * weights[0], found.eps, 0.0), RmsNorm(ones * weights[1], found.eps, 0.0)


def _value_norm(values: nn.Module, queries: nn.Module | None) -> RmsNorm:
    """The norm of values' heads, which may have no weight; that of the queries' says how wide it would be."""
    weight = getattr(queries, "weight", None)
    found = read_rms_norm(values, None if weight is None else torch.ones_like(weight))
    if found is None:
        raise UnknownLayerError(f"a norm of values of the kind {type(values).__name__}")
    return found


def _fused_qkv(module: nn.Module, attention: nn.Module, head_dim: int) -> JoinedProjection:
    config: Any = attention.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return JoinedProjection([projection_of(module)], [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim])
