"""Estimates from a model's configuration: bytes of a token in the KV cache, of states, of a step, of adapters, on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from server.checkpoint.sharding.shards import layer_configs
from server.checkpoint.states import STATE_KINDS, attends, has_states, kinds_of_layers
from server.config import EngineConfig
from server.engine.runtime.attention.base import LayerShape
from server.engine.runtime.attention.kernels.kv_cache import bytes_per_token, stored_dtype
from server.engine.runtime.layers.stateful.pieces import MAX_LIVE_BYTES
from server.engine.runtime.states.kinds import gated_delta, mamba2, short_convolution

_MAMBA2_NAMES = (
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
)
DTYPE = torch.bfloat16
"""Of weights that are not in NF4, and of activations."""


def token_bytes(text: Any, engine: EngineConfig, ranks: int = 1) -> int:
    """Bytes of one token in the KV cache of a GPU, one of ranks, all layers together.

    text: the configuration of the text's model. Every rank has the latents of latent attention, in 16 bits.
    """
    layers = _attending(text)
    if keeps_latents(text, engine):
        latent = LayerShape(1, text.kv_lora_rank + text.qk_rope_head_dim, text.kv_lora_rank, is_latent=True)
        return len(layers) * latent.bytes_per_token(DTYPE.itemsize)
    dtype = stored_dtype(engine.kv_cache_dtype, DTYPE)
    return sum(bytes_per_token(_shape(layer), dtype) for layer in layers) // ranks


def latent_bytes(text: Any, engine: EngineConfig) -> int:
    """Bytes of the matrices of latent attention in 16 bits, all layers together; 0: the cache keeps no latents."""
    if not keeps_latents(text, engine):
        return 0
    numbers = text.num_attention_heads * (text.qk_nope_head_dim + text.v_head_dim) * text.kv_lora_rank
    return int(len(_attending(text)) * numbers * DTYPE.itemsize)


def keeps_latents(text: Any, engine: EngineConfig) -> bool:
    """Whether the cache on a GPU keeps latents (model/latents.py), as configurations tell it."""
    return bool(getattr(text, "kv_lora_rank", None)) and not engine.lora_slots


def _layers(text: Any) -> list[Any]:
    """The configuration of each layer; some layers of Gemma 4 have sizes of their own."""
    found = layer_configs(text)
    return found * text.num_hidden_layers if len(found) == 1 else found


def _attending(text: Any) -> list[Any]:
    """The configurations of the layers that attend."""
    layers = _layers(text)
    kinds = kinds_of_layers(text) or [""] * len(layers)
    return [layer for layer, kind in zip(layers, kinds, strict=True) if attends(kind)]


def _shape(layer: Any) -> LayerShape:
    heads = layer.num_attention_heads
    kv_heads = 1 if getattr(layer, "multi_query", False) else getattr(layer, "num_key_value_heads", None) or heads
    if getattr(layer, "kv_lora_rank", None):
        return LayerShape(heads, layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim, heads)
    width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return LayerShape(kv_heads, width, width, heads)


def _inner(layer: Any) -> int:
    """The width of a layer's feed-forward part; Gemma 3n has a list of them. 0: the configuration does not say it."""
    own: Any = getattr(layer, "intermediate_size", None) or 0
    return max(own) if isinstance(own, list) else int(own)


def state_bytes(config: Any) -> int:
    """Bytes of the states of one sequence, all layers together; 0: the model has none."""
    if not has_states(config):
        return 0
    text = config.get_text_config()
    count = sum(kind in STATE_KINDS for kind in kinds_of_layers(config))
    if sizes := _mamba2_sizes(text):
        heads, head_dim, state_dim, groups, taps = sizes
        return count * mamba2(heads * head_dim + 2 * groups * state_dim, taps, heads, state_dim, head_dim, DTYPE).nbytes
    if hasattr(text, "conv_L_cache"):
        return count * short_convolution(text.hidden_size, text.conv_L_cache, DTYPE).nbytes
    key, value = text.linear_key_head_dim, text.linear_value_head_dim
    channels = 2 * text.linear_num_key_heads * key + text.linear_num_value_heads * value
    kind = gated_delta(channels, text.linear_conv_kernel_dim, text.linear_num_value_heads, key, value, DTYPE)
    return count * kind.nbytes


def _mamba2_sizes(text: Any) -> list[int]:
    """Heads, their width, the state's columns, groups and taps by a configuration of Mamba2; empty for another one."""
    for names in _MAMBA2_NAMES:
        sizes: list[Any] = [getattr(text, name, None) for name in names]
        if None not in sizes:
            return [int(size) for size in sizes]
    return []


def step_bytes(text: Any, tokens: int, sequences: int) -> int:
    """About what a largest step holds: activations of a layer, one weight in 16 bits, logits in 32."""
    layers = layer_configs(text)
    dense = max(_inner(layer) for layer in layers)
    inner = dense
    if experts := getattr(text, "num_experts_per_tok", getattr(text, "top_k_experts", None)):
        inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
    heads = max(
        layer.num_attention_heads * (getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
        for layer in layers
    )
    width = max(heads, 0 if experts else dense)
    # Chunks of prompts over states that are matrices.
    chunk = MAX_LIVE_BYTES if any(kind in STATE_KINDS and kind != "conv" for kind in kinds_of_layers(text)) else 0
    activations = max(tokens, sequences) * (3 * inner + 6 * text.hidden_size) * DTYPE.itemsize
    return int(chunk + activations + DTYPE.itemsize * width * text.hidden_size + 12 * sequences * text.vocab_size)


def adapter_bytes(text: Any, engine: EngineConfig) -> int:
    """About what the slots of adapters take: factors of all projections, and tables of the vocabulary."""
    rank, hidden, factors = engine.max_lora_rank or 16, text.hidden_size, 0
    for layer in _layers(text):
        inner, shape = _inner(layer) or 4 * hidden, _shape(layer)
        queries, keys = shape.heads * shape.key_dim, shape.kv_heads * shape.key_dim
        factors += rank * (2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner))
    tables = sum(kind in engine.lora_extra for kind in ("head", "embedding")) * text.vocab_size * hidden
    return int(engine.lora_slots * (factors + tables) * DTYPE.itemsize)
