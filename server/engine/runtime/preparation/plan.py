"""What a start will take of a GPU's memory, part by part, before anything is loaded.

Weights are counted by the checkpoint's tensors, keys, values and states by its configuration. What steps, adapters and
graphs take is estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from server.checkpoint.inspection import CheckpointInfo
from server.checkpoint.parts import EMBEDDING, NF4, OTHERS, OUTPUT_LAYER, SKIPPED, TOWER, copied_bytes, weight_parts
from server.checkpoint.states import STATE_KINDS, has_states, kinds_of_layers
from server.config import EngineConfig
from server.engine.runtime.attention.base import LayerShape
from server.engine.runtime.attention.kernels.kv_cache import bytes_per_token, stored_dtype
from server.engine.runtime.limits import SEQUENCE_LIMITS, TOKEN_BUDGETS, auto_sequences, own_limit
from server.engine.runtime.model.expanded import AUTO_SHARE, AUTO_SHARE_BESIDE_CACHE
from server.engine.runtime.preparation.states import SNAPSHOTS_OF_ONE
from server.engine.runtime.states.kinds import gated_delta, short_convolution

USEFUL_TOKENS = 4096
"""With a KV cache of fewer tokens a start warns."""
TOKENS_BEFORE_COPIES = 32768
"""Tokens that find room in the KV cache before weights get 16-bit copies."""
_WEIGHTS = (NF4, SKIPPED, OTHERS, EMBEDDING, OUTPUT_LAYER, TOWER)
_ADAPTERS, _STATES, _COPIES = "adapters", "states of layers", "16-bit copies, at most"
_DTYPE = torch.bfloat16
_MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """A device's memory before a start, in bytes."""

    free: int
    total: int
    reserve: int
    """What stays free: for CUDA graphs, gaps between tensors, and a screen."""


@dataclass(frozen=True)
class MemoryPlan:
    """What a start takes of a device's free memory, in bytes."""

    memory: Memory
    parts: Mapping[str, int]
    """All but the KV cache, in the order of the table."""
    token: int
    """Bytes of one token in the KV cache, and in a draft model's."""
    wanted: int
    """Tokens that the KV cache should hold."""
    kept: int
    """Bytes that are taken before weights get 16-bit copies: a useful KV cache, states, adapters and a step."""
    fixed_cache: int | None = None
    """engine.kv_cache_bytes."""

    @property
    def cache(self) -> int:
        """Bytes for the KV cache; less than 0: all else does not fit."""
        left = self.memory.free - sum(self.parts.values())
        return left if self.fixed_cache is None else min(left, self.fixed_cache)

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return max(0, self.cache) // self.token

    @property
    def weights(self) -> int:
        """Bytes of the model's weights."""
        return sum(self.parts.get(name, 0) for name in _WEIGHTS)

    @property
    def fits(self) -> bool:
        """Whether the KV cache holds as many tokens as it should."""
        return self.tokens >= self.wanted

    @property
    def needed(self) -> int:
        """Bytes with which the KV cache holds as many tokens as it should."""
        return sum(self.parts.values()) + self.token * self.wanted

    def table(self) -> str:
        """A line for each part."""
        rows = [(name, size) for name, size in self.parts.items() if size >= _MIB]
        rows.append((f"KV cache of {self.tokens} tokens", max(0, self.cache)))
        lines = [f"  {name:<32}{size / 2**30:8.2f} GiB" for name, size in rows]
        free, total = self.memory.free / 2**30, self.memory.total / 2**30
        return "\n".join([f"memory, of {free:.2f} GiB free of {total:.2f}:", *lines])


def plan_memory(
    info: CheckpointInfo,
    config: Any,
    engine: EngineConfig,
    memory: Memory,
    *,
    draft: tuple[CheckpointInfo, Any] | None = None,
    ranks: int = 1,
) -> MemoryPlan:
    """The plan of a start on a GPU.

    info: of the tensors that are loaded. config: transformers' configuration. draft:
    the same two of a draft model. ranks: GPUs that divide the model.
    """
    text = config.get_text_config()
    weights = weight_parts(info, _DTYPE.itemsize, keeps_fp4=False)
    parts = {name: weights.get(name, 0) // (1 if name in (TOWER, OTHERS) else ranks) for name in _WEIGHTS}
    token = token_bytes(text, engine) // ranks
    if draft is not None:
        parts["draft model"] = draft[0].loaded_bytes(_DTYPE.itemsize)
        token += token_bytes(draft[1].get_text_config(), engine)
    parts[_ADAPTERS] = adapter_bytes(text, engine) // ranks
    sequences = _sequences(engine, memory)
    parts["reserve"] = memory.reserve
    step = step_bytes(text, engine.max_num_batched_tokens or TOKEN_BUDGETS["cuda"], sequences)
    parts["a largest step (estimate)"] = step
    own = own_limit(text) or TOKENS_BEFORE_COPIES
    wanted = max(engine.max_model_len or 0, min(USEFUL_TOKENS, own))
    left = memory.free - sum(parts.values())
    if state := state_bytes(config):
        snapshots = 0
        if engine.enable_prefix_caching and engine.state_snapshot_bytes is None:
            state = int(state * (1 + SNAPSHOTS_OF_ONE))
        elif engine.enable_prefix_caching:
            snapshots = engine.state_snapshot_bytes or 0
        # Two sequences run in the check of a start.
        parts[_STATES] = snapshots + state * max(2, min(sequences, (left - snapshots - wanted * token) // state))
        left -= parts[_STATES]
    cache = engine.kv_cache_bytes
    useful = max(wanted, min(TOKENS_BEFORE_COPIES, own)) * token if cache is None else cache
    if engine.expanded_weights == "auto" and not engine.batch_invariant:
        share = (left - (cache or 0)) * (AUTO_SHARE if cache is None else AUTO_SHARE_BESIDE_CACHE)
        parts[_COPIES] = int(max(0, min(share, left - useful, copied_bytes(info) // ranks)))
    elif isinstance(engine.expanded_weights, int):
        parts[_COPIES] = engine.expanded_weights
    # The KV cache that is configured is subtracted where copies are made.
    kept = parts[_ADAPTERS] + parts.get(_STATES, 0) + step + (useful if cache is None else 0)
    return MemoryPlan(memory, parts, token, wanted, kept, cache)


def token_bytes(text: Any, engine: EngineConfig) -> int:
    """Bytes of one token in the KV cache on a GPU, all layers together. text: the configuration of the text's model."""
    dtype, kinds = stored_dtype(engine.kv_cache_dtype, _DTYPE), kinds_of_layers(text) or [""] * text.num_hidden_layers
    return sum(bytes_per_token(_shape(text, kind), dtype) for kind in kinds if kind not in STATE_KINDS)


def _shape(text: Any, kind: str) -> LayerShape:
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if getattr(text, "kv_lora_rank", None):
        return LayerShape(heads, text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim, heads)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    if kind == "full_attention":  # Gemma 4's differ from those with a window
        width = getattr(text, "global_head_dim", None) or width
        kv_heads = getattr(text, "num_global_key_value_heads", None) or kv_heads
    return LayerShape(kv_heads, width, width, heads)


def state_bytes(config: Any) -> int:
    """Bytes of the states of one sequence, all layers together; 0: the model has none."""
    if not has_states(config):
        return 0
    text = config.get_text_config()
    count = sum(kind in STATE_KINDS for kind in kinds_of_layers(config))
    if hasattr(text, "conv_L_cache"):
        return count * short_convolution(text.hidden_size, text.conv_L_cache, _DTYPE).nbytes
    key, value = text.linear_key_head_dim, text.linear_value_head_dim
    channels = 2 * text.linear_num_key_heads * key + text.linear_num_value_heads * value
    kind = gated_delta(channels, text.linear_conv_kernel_dim, text.linear_num_value_heads, key, value, _DTYPE)
    return count * kind.nbytes


def step_bytes(text: Any, tokens: int, sequences: int) -> int:
    """About what a largest step holds: activations of a layer, one weight in 16 bits, logits in 32."""
    dense = getattr(text, "intermediate_size", None) or 0
    inner = dense
    if experts := getattr(text, "num_experts_per_tok", None):
        inner = experts * (getattr(text, "moe_intermediate_size", None) or inner)
    heads = text.num_attention_heads
    width = max(heads * (getattr(text, "head_dim", None) or text.hidden_size // heads), 0 if experts else dense)
    activations = max(tokens, sequences) * (3 * inner + 6 * text.hidden_size) * _DTYPE.itemsize
    return int(activations + _DTYPE.itemsize * width * text.hidden_size + 12 * sequences * text.vocab_size)


def adapter_bytes(text: Any, engine: EngineConfig) -> int:
    """About what the slots of adapters take: factors of all projections, and tables of the vocabulary."""
    rank, hidden = engine.max_lora_rank or 16, text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    shape = _shape(text, "")
    queries, keys = shape.heads * shape.key_dim, shape.kv_heads * shape.key_dim
    factors = text.num_hidden_layers * rank * (2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + inner))
    tables = sum(kind in engine.lora_extra for kind in ("head", "embedding")) * text.vocab_size * hidden
    return int(engine.lora_slots * (factors + tables) * _DTYPE.itemsize)


def _sequences(engine: EngineConfig, memory: Memory) -> int:
    if engine.max_num_seqs == "auto":
        return auto_sequences(memory.total, None)
    return engine.max_num_seqs or SEQUENCE_LIMITS["cuda"]


def savings(engine: EngineConfig, plan: Callable[[EngineConfig], MemoryPlan], devices: int) -> dict[str, int]:
    """Options that would free memory, each with its bytes, most first.

    plan: the plan of a start with a configuration. devices: GPUs of the machine.
    """
    now, found = plan(engine), {}
    fewer = 8 if engine.max_num_seqs in (None, "auto") or int(engine.max_num_seqs) > 8 else 1
    for name, value in (_ECONOMIES | {"max_num_seqs": fewer}).items():
        changed = plan(engine.model_copy(update={name: value}))
        found[f"engine.{name} {str(value).lower()}"] = now.needed - changed.needed
    if devices > 1 and engine.tensor_parallel_size == 1:
        found["engine.tensor_parallel_size 2"] = now.weights // 2
    useful = {name: size for name, size in found.items() if size >= 32 * _MIB}
    return dict(sorted(useful.items(), key=lambda item: -item[1]))


_ECONOMIES = {"images": False, "expanded_weights": "off", "max_num_batched_tokens": 1024, "kv_cache_dtype": "int8"}
"""Options with the values that take less memory."""
