"""Rules that read the parts of a decoder layer from transformers' module of it.

A rule goes by the names of a layer's modules and by what they compute on random input, never by a family. What a rule gets
wrong is found by the warm-up check, which compares every layer with transformers' own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.calls import LATENT_HEADS
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.layers.attention import Attention
from server.engine.runtime.layers.decoder import Block, DecoderLayer, FeedForward, Mixer, ParallelMixers
from server.engine.runtime.layers.experts import Experts, read_router
from server.engine.runtime.layers.latent_attention import LatentAttention, read_latent_attention
from server.engine.runtime.layers.mlp import GatedMlp, Mlp, read_activation
from server.engine.runtime.layers.norm import RmsNorm, read_norm, read_rms_norm
from server.engine.runtime.layers.projection import JoinedProjection, joined, projection_of
from server.engine.runtime.layers.state_layers import StateLayers, StateMixer
from server.engine.runtime.model.exchanged import ReducedNorm
from server.engine.runtime.model.exchanged_experts import ReducedBlock, ReducedExperts

# The places of a layer's norms, by their names: before and after attention, before and after the feed-forward part.
_PLACES: tuple[tuple[str | None, str | None, str | None, str | None], ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("input_layernorm", None, "pre_feedforward_layernorm", None),
    ("attention_layernorm", None, "feedforward_layernorm", None),
    ("input_layernorm", None, "pre_ff_layernorm", None),
    ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
    ("operator_norm", None, "ffn_norm", None),
    # The one norm is in front of both parts.
    ("input_layernorm", None, None, None),
)
_FEED_FORWARDS = ("mlp", "block_sparse_moe", "feed_forward", "shared_mlp")
_OUTPUTS = ("o_proj", "dense", "out_proj")
_HEAD_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm"))
_MLPS = (("up_proj", "down_proj"), ("fc1", "fc2"), ("c_fc", "c_proj"), ("input_linear", "output_linear"))
_ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")
_DROPOUTS = (nn.Dropout, nn.Identity)


class UnknownLayerError(Exception):
    """No rule describes a layer; the message says what it has, in one line."""


def attention_name(layer: nn.Module) -> str | None:
    """What a layer calls its attention; None if it has none."""
    # What Nemotron-H calls a mixer may be something else.
    own = ((name, child) for name, child in layer.named_children() if name in ("self_attn", "mixer"))
    return next((name for name, child in own if name == "self_attn" or hasattr(child, "is_causal")), None)


def read_layer(
    layer: nn.Module, index: int, options: AttentionOptions | None, states: StateLayers | None = None
) -> DecoderLayer:
    """The written layer for transformers' module of it, whose projections are in their final form.

    index: its place among the layers that attend, with the options that the layer attends with; None: it does not attend.
    states: the layers of the model that have states. Raises UnknownLayerError.
    """
    mixers: dict[str, Mixer] = {}
    name = attention_name(layer)
    if options is not None and name is not None:
        module = _children(layer, (name,))[name]
        is_latent = getattr(module, LATENT_HEADS, None) is not None
        mixers[name] = (_read_latent if is_latent else _read_attention)(module, index, options)
    if states is not None:
        mixers |= {name: states.mixers[own] for name, own in layer.named_children() if own in states.mixers}
    if {name for name, _ in layer.named_children()} == {"norm", "mixer"}:
        return _read_one_part(layer, mixers)
    if not mixers:
        raise UnknownLayerError(f"{type(layer).__name__} has no mixer")
    return _with_mixer(layer, tuple(mixers), _joined_mixers(layer, list(mixers.values())))


def _read_latent(module: nn.Module, index: int, options: AttentionOptions) -> LatentAttention:
    try:
        return read_latent_attention(module, index, options)
    except ValueError as e:
        raise UnknownLayerError(f"{type(module).__name__} {e}") from e


def _joined_mixers(layer: Any, mixers: list[Mixer]) -> Mixer:
    """The one mixer of a layer, or its two."""
    if len(mixers) == 1:
        return mixers[0]
    attention, state = mixers
    factors = [getattr(layer, f"{name}_multiplier", None) for name in ("attention_in", "attn_out", "ssm_out")]
    if not isinstance(attention, Attention) or not isinstance(state, StateMixer) or None in factors:
        raise UnknownLayerError(f"{type(layer).__name__} has two mixers of another kind than Falcon-H1's")
    before, attended, advanced = map(float, factors)  # type: ignore[arg-type]
    return ParallelMixers(attention, state, before, (attended, advanced))


def _read_one_part(layer: nn.Module, mixers: Mapping[str, Mixer]) -> DecoderLayer:
    """A layer of one part with a norm before it (Nemotron-H)."""
    children = _children(layer, ("norm", "mixer"))
    block, nothing = Block(read_norm(children["norm"]), None, 1.0), Block(None, None, 1.0)
    if mixers:
        return DecoderLayer(mixers["mixer"], block, None, nothing)
    return DecoderLayer(None, nothing, _read_mlp(children["mixer"]), block)


def _with_mixer(layer: nn.Module, mixer_names: tuple[str, ...], mixer: Mixer) -> DecoderLayer:
    children = _children(layer, mixer_names)
    mlp_name = next((name for name in _FEED_FORWARDS if name in children), _FEED_FORWARDS[0])
    beside = "shared_mlp" if mlp_name == "block_sparse_moe" and "shared_mlp" in children else None
    norms = {name: child for name, child in children.items() if name not in (*mixer_names, mlp_name, beside)}
    places = next((places for places in _PLACES if set(norms) == {name for name in places if name}), None)
    if places is None or len(norms) + len(mixer_names) + 1 + (beside is not None) != len(children):
        raise UnknownLayerError(f"{type(layer).__name__} has {', '.join(children)}")
    mlp = _read_mlp(children[mlp_name])
    if beside is not None:
        mlp = _with_shared(mlp, children[beside])
    before, after, before_mlp, after_mlp = (None if name is None else read_norm(norms[name]) for name in places)
    multiplier = float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0)))
    of_mlp = multiplier * float(getattr(children[mlp_name], "down_multiplier", 1.0))
    blocks = Block(before, after, multiplier), Block(before_mlp, after_mlp, of_mlp)
    is_parallel = len(norms) == 1
    if is_parallel and multiplier != 1.0:
        raise UnknownLayerError(f"{type(layer).__name__} multiplies what its parallel parts add")
    scale = getattr(layer, "layer_scalar", None)
    if is_parallel and scale is not None:
        raise UnknownLayerError(f"{type(layer).__name__} multiplies the sum of parallel parts")
    return DecoderLayer(mixer, blocks[0], mlp, blocks[1], is_parallel, scale)


def _children(module: nn.Module, needed: tuple[str, ...]) -> Mapping[str, nn.Module]:
    """A module's children but for those that do nothing; UnknownLayerError if it lacks one or has parameters itself."""
    found = {name: child for name, child in module.named_children() if not isinstance(child, _DROPOUTS)}
    missing = [name for name in needed if name not in found]
    # The attention's backend has seen the sinks.
    own = [name for name, _ in module.named_parameters(recurse=False) if name != "sinks"]
    if missing or own:
        raise UnknownLayerError(f"{type(module).__name__} has {', '.join([*found, *own])}")
    return found


def _read_attention(module: nn.Module, index: int, options: AttentionOptions) -> Attention:
    head_dim = getattr(module, "head_dim", None)
    children = dict(_children(module, ()))
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
    values = children.pop("v_norm", None)
    if children or (queries is None) != (keys is None):
        raise UnknownLayerError(f"{type(module).__name__} has {', '.join(children) or 'one norm for queries and keys'}")
    norms = {} if queries is None or keys is None else _qk_norms(queries, keys, head_dim)
    return Attention(
        index,
        head_dim,
        qkv,
        output,
        options,
        is_rotary=_is_rotary(module),
        is_gated=is_gated,
        angles_once=_takes_angles_once(module),
        angle_step=_angle_step(module),
        norms_last=norms_last,
        key_multiplier=float(getattr(module, "key_multiplier", 1.0)),
        value_norm=None if values is None else _value_norm(values, queries),
        **norms,
    )


def _is_rotary(attention: nn.Module) -> bool:
    """Whether a layer has rotary embeddings; some families leave them out of some layers (NoPE)."""
    # Exaone 4 has them in its sliding layers only; others give their full layers no window at all.
    is_full = not getattr(attention, "is_sliding", True) and getattr(attention, "sliding_window", None) is not None
    return bool(getattr(attention, "use_rope", True)) and not is_full


def _takes_angles_once(attention: nn.Module) -> bool:
    """Whether an attention's rotary function takes one angle for each pair of elements, rather than for each element."""
    heads, angles = torch.zeros(1, 1, 2, 8), torch.zeros(1, 2, 4)
    found, ones = (_rotated(attention, given, angles, angles) for given in (heads, heads + 1))
    # Others that take angles of half a head's columns rotate these columns only, and drop or keep the rest.
    return found is not None and ones is not None and found.shape == heads.shape and not bool(ones.any())


def _angle_step(attention: nn.Module) -> int:
    """RotaryEmbedding.angle_step of an attention's rotary function."""
    random = torch.Generator().manual_seed(0)
    heads, cos, sin = (torch.randn(shape, generator=random) for shape in ((1, 1, 2, 8), (1, 2, 4), (1, 2, 4)))
    # Functions that read each element's own angle expect neighbours to have the same one.
    cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    found = _rotated(attention, heads, cos, sin)
    if found is None or found.shape != heads.shape:
        return 0
    for step in (1, 2):
        rotary = RotaryEmbedding(cos[0], sin[0], angle_step=step)
        expected = rotary.apply(heads[0].transpose(0, 1), heads[0].transpose(0, 1))[0]
        if torch.allclose(found[0].transpose(0, 1), expected, atol=1e-5):
            return step
    return 0


def _rotated(attention: nn.Module, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """What an attention's rotary function makes of queries [1, heads, T, dim]; None if it takes other arguments."""
    rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    try:
        found = rotate(heads, heads, cos, sin)[0] if rotate is not None else None
    except (RuntimeError, TypeError, ValueError):
        return None
    return found if isinstance(found, torch.Tensor) else None


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


def _read_mlp(module: nn.Module) -> FeedForward:
    if isinstance(module, ReducedBlock):
        return _read_experts(module.block, is_partial=True)
    if any(name == "experts" for name, _ in module.named_children()):
        return _read_experts(module, is_partial=False)
    return _read_dense(module)


def _with_shared(mlp: FeedForward, module: nn.Module) -> Experts:
    """Experts with the expert that all tokens share, which the layer has next to them (Granite)."""
    shared = _read_dense(module)
    if not isinstance(mlp, Experts) or not isinstance(shared, GatedMlp) or mlp.shared is not None or mlp.is_partial:
        raise UnknownLayerError(f"{type(module).__name__} next to a feed-forward part of another kind")
    return replace(mlp, shared=shared)


def _read_dense(module: nn.Module) -> GatedMlp | Mlp:
    function: Any = next((getattr(module, name) for name in _ACTIVATIONS if hasattr(module, name)), None)
    children = dict(_children(module, ()))
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
    children = dict(_children(module, ("experts",)))
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
    bias: torch.Tensor | None = getattr(module, "expert_bias", None)
    both = (latent[0], latent[1]) if len(latent) == 2 else None
    return Experts(read_router(router, bias), experts, dense, gate, is_partial, both)
