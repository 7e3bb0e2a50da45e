"""Rules that read the parts of a decoder layer from transformers' module of it.

A rule goes by the names of a layer's modules and by what they compute on random input, never by a family. What a rule gets
wrong is found by the warm-up check, which compares every layer with transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.calls import LATENT_HEADS
from server.engine.runtime.layers import parallel_experts
from server.engine.runtime.layers.attention import Attention
from server.engine.runtime.layers.attention_spec import read_attention
from server.engine.runtime.layers.decoder import Block, DecoderLayer, Mixer, ParallelMixers
from server.engine.runtime.layers.feed_forward_spec import read_feed_forward, with_shared
from server.engine.runtime.layers.latent_attention import LatentAttention, read_latent_attention
from server.engine.runtime.layers.mlp import GatedMlp, Mlp
from server.engine.runtime.layers.norm import read_norm
from server.engine.runtime.layers.parts import UnknownLayerError, children_of
from server.engine.runtime.layers.stateful.state_layers import StateLayers, StateMixer

# The places of a layer's norms, by their names: before and after attention, before and after the feed-forward part.
_PLACES: tuple[tuple[str | None, str | None, str | None, str | None], ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
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


def attention_name(layer: nn.Module) -> str | None:
    """Name that a layer has for its attention; None if it has none."""
    # What Nemotron-H calls a mixer may be something else.
    own = ((name, child) for name, child in layer.named_children() if name in ("self_attn", "mixer"))
    return next((name for name, child in own if name == "self_attn" or hasattr(child, "is_causal")), None)


def read_layer(
    layer: nn.Module,
    index: int,
    options: AttentionOptions | None,
    states: StateLayers | None = None,
    is_rotary: bool = True,
) -> DecoderLayer:
    """The written layer for transformers' module of it, whose projections are in their final form.

    index: its place among the layers that attend, with the options that the layer attends with; None: it does not attend.
    states: the layers of the model that have states. is_rotary: whether it applies rotary embeddings.
    Raises UnknownLayerError.
    """
    mixers: dict[str, Mixer] = {}
    name = attention_name(layer)
    if options is not None and name is not None:
        module = children_of(layer, (name,))[name]
        if getattr(module, LATENT_HEADS, None) is not None:
            mixers[name] = _read_latent(module, index, options)
        else:
            norms = (p.detach() for p in layer.parameters() if p.dim() == 1 and p.is_floating_point())
            mixers[name] = read_attention(module, index, options, is_rotary, next(norms, None))
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
    children = children_of(layer, ("norm", "mixer"))
    block, nothing = Block(read_norm(children["norm"]), None, 1.0), Block(None, None, 1.0)
    if mixers:
        return DecoderLayer(mixers["mixer"], block, None, nothing)
    return DecoderLayer(None, nothing, read_feed_forward(children["mixer"]), block)


def _with_mixer(layer: nn.Module, mixer_names: tuple[str, ...], mixer: Mixer) -> DecoderLayer:
    children = dict(children_of(layer, mixer_names))
    experts = {name: children.pop(name) for name in parallel_experts.NAMES if name in children}
    if experts and len(experts) < len(parallel_experts.NAMES):
        raise UnknownLayerError(f"{type(layer).__name__} has {', '.join([*children, *experts])}")
    mlp_name = next((name for name in _FEED_FORWARDS if name in children), _FEED_FORWARDS[0])
    beside = "shared_mlp" if mlp_name == "block_sparse_moe" and "shared_mlp" in children else None
    norms = {name: child for name, child in children.items() if name not in (*mixer_names, mlp_name, beside)}
    places = next((places for places in _PLACES if set(norms) == {name for name in places if name}), None)
    if places is None or len(norms) + len(mixer_names) + 1 + (beside is not None) != len(children):
        raise UnknownLayerError(f"{type(layer).__name__} has {', '.join(children)}")
    mlp = read_feed_forward(children[mlp_name])
    if experts:
        if not isinstance(mlp, GatedMlp | Mlp):
            raise UnknownLayerError(f"{type(layer).__name__} has experts in two places")
        mlp = parallel_experts.read_parallel_experts(mlp, experts)
    if beside is not None:
        mlp = with_shared(mlp, children[beside])
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
