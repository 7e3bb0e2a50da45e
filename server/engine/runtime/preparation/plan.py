"""Plan of the GPU memory that a start will take, part by part, before anything is loaded.

Weights are counted by the checkpoint's tensors, keys, values and states by its configuration. What steps, adapters and
graphs take is estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from server.checkpoint.inspection import CheckpointInfo
from server.checkpoint.late import Economies
from server.checkpoint.parts import EMBEDDING, NF4, OTHERS, OUTPUT_LAYER, SKIPPED, TOWER, copied_bytes, weight_parts
from server.config import EngineConfig
from server.engine.runtime.limits import SEQUENCE_LIMITS, TOKEN_BUDGETS, auto_sequences, own_limit
from server.engine.runtime.model.expanded import AUTO_SHARE, AUTO_SHARE_BESIDE_CACHE
from server.engine.runtime.preparation.estimates import (
    DTYPE,
    adapter_bytes,
    latent_bytes,
    state_bytes,
    step_bytes,
    token_bytes,
)
from server.engine.runtime.preparation.states import state_slots, states_of_one

USEFUL_TOKENS = 4096
"""With a KV cache of fewer tokens a start warns."""
TOKENS_BEFORE_COPIES = 32768
"""Tokens that find room in the KV cache before weights get 16-bit copies."""
_WEIGHTS = (NF4, SKIPPED, OTHERS, EMBEDDING, OUTPUT_LAYER, TOWER)
_ADAPTERS, _STATES, _COPIES = "adapters", "states of layers", "16-bit copies, at most"
_LATENTS = "latent attention's matrices"
_MARGIN = 1.1  # what a step takes is estimated
_UNCOUNTED_BYTES = 192 * 2**20
"""Gaps between tensors after loading, and code of kernels: gpt-oss-20b had 90 MiB less than its plan on an H200."""
_MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """A device's memory before a start, in bytes."""

    free: int
    total: int
    reserve: int
    """Bytes that stay free: for CUDA graphs, gaps between tensors, and a screen."""


@dataclass(frozen=True)
class MemoryPlan:
    """Parts that a start takes of a device's free memory, in bytes."""

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
    def left(self) -> int:
        """Bytes that all but the KV cache leave; less than 0: it does not fit."""
        return self.memory.free - sum(self.parts.values())

    @property
    def cache(self) -> int:
        """Bytes for the KV cache."""
        return max(0, self.left if self.fixed_cache is None else min(self.left, self.fixed_cache))

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.cache // self.token

    @property
    def weights(self) -> int:
        """Bytes of the model's weights."""
        return sum(self.parts.get(name, 0) for name in _WEIGHTS)

    @property
    def fits(self) -> bool:
        """Whether the KV cache holds as many tokens as it should, or gets the bytes that are configured."""
        return self.tokens >= self.wanted if self.fixed_cache is None else self.left >= self.fixed_cache

    @property
    def fits_surely(self) -> bool:
        """Whether it fits with a little more than what is counted."""
        needed = self.token * self.wanted + _UNCOUNTED_BYTES
        return self.fits and (self.fixed_cache is not None or self.cache >= needed)

    @property
    def needed(self) -> int:
        """Bytes with which the plan fits."""
        cache = self.token * self.wanted if self.fixed_cache is None else self.fixed_cache
        return sum(self.parts.values()) + cache

    def table(self) -> str:
        """A line for each part."""
        rows = [(name, size) for name, size in self.parts.items() if size >= _MIB]
        rows.append((f"KV cache of {self.tokens} tokens", self.cache))
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
    weights = weight_parts(info, DTYPE.itemsize, keeps_fp4=False)
    wanted_forms = Economies.of(engine, "cuda")
    if getattr(text, "tie_word_embeddings", False):
        weights.pop(OUTPUT_LAYER, None)
        wanted_forms = replace(wanted_forms, host_embedding=False)
    weights = wanted_forms.applied(weights, DTYPE.itemsize)
    parts = {name: weights.get(name, 0) // (1 if name in (TOWER, OTHERS) else ranks) for name in _WEIGHTS}
    token = token_bytes(text, engine, ranks)
    if draft is not None:
        parts["draft model"] = draft[0].loaded_bytes(DTYPE.itemsize)
        token += token_bytes(draft[1].get_text_config(), engine)
    parts[_ADAPTERS] = adapter_bytes(text, engine) // ranks
    parts[_LATENTS] = latent_bytes(text, engine) // ranks
    sequences = _sequences(engine, memory)
    parts["reserve"] = memory.reserve
    step = step_bytes(text, engine.max_num_batched_tokens or TOKEN_BUDGETS["cuda"], sequences)
    parts["a largest step (estimate)"] = step
    own = own_limit(text) or TOKENS_BEFORE_COPIES
    wanted = max(engine.max_model_len or 0, min(USEFUL_TOKENS, own))
    left = memory.free - sum(parts.values())
    if state := state_bytes(config) // ranks:
        slots = state_slots(state, token, max(0, left), engine.kv_cache_bytes, engine, sequences)
        # Two sequences run in the check of a start.
        backups = (states_of_one(engine) - 1) * slots.sequences
        parts[_STATES] = state * (max(2, slots.sequences + slots.snapshots) + backups)
        left -= parts[_STATES]
    cache = engine.kv_cache_bytes
    useful = max(wanted, min(TOKENS_BEFORE_COPIES, own)) * token if cache is None else cache
    if engine.expanded_weights == "auto" and not engine.batch_invariant:
        share = (left - (cache or 0)) * (AUTO_SHARE if cache is None else AUTO_SHARE_BESIDE_CACHE)
        parts[_COPIES] = int(max(0, min(share, left - _MARGIN * useful, copied_bytes(info) // ranks)))
    elif isinstance(engine.expanded_weights, int):
        parts[_COPIES] = engine.expanded_weights
    # The KV cache that is configured is subtracted where copies are made.
    kept = sum(parts.get(name, 0) for name in (_ADAPTERS, _LATENTS, _STATES)) + step
    if cache is None:
        kept += int(_MARGIN * useful)
    return MemoryPlan(memory, parts, token, wanted, kept, cache)


def _sequences(engine: EngineConfig, memory: Memory) -> int:
    if engine.max_num_seqs == "auto":
        return auto_sequences(memory.total, None)
    return engine.max_num_seqs or SEQUENCE_LIMITS["cuda"]


def decide(engine: EngineConfig, plan: Callable[[EngineConfig], MemoryPlan]) -> EngineConfig:
    """A configuration in which engine.quantize_output_layer is not auto. plan: the plan of a start with a configuration."""
    if engine.quantize_output_layer != "auto":
        return engine
    off, small = (engine.model_copy(update={"quantize_output_layer": value}) for value in ("off", "nf4"))
    # Without a length that is asked for, contexts are as long as the cache allows.
    fits = plan(off).fits if engine.max_model_len is None else plan(off).fits_surely
    return small if not fits and plan(small).fits else off


def savings(
    engine: EngineConfig, plan: Callable[[EngineConfig], MemoryPlan], devices: int, ranks: int = 1
) -> dict[str, int]:
    """Options that would free memory, each with its bytes, most first; none that the others exclude.

    plan: the plan of a start with a configuration. devices: GPUs of the machine. ranks: those that divide the model.
    """
    now, found = plan(engine), {}
    for name, value in _economies(engine, ranks).items():
        changed = plan(engine.model_copy(update={name: value}))
        # States and copies grow into memory that others leave.
        grown = sum(max(0, changed.parts.get(part, 0) - now.parts.get(part, 0)) for part in (_STATES, _COPIES))
        found[f"engine.{name} {str(value).lower()}"] = now.needed - changed.needed + grown
    if devices > 1 and engine.tensor_parallel_size == 1 and not engine.batch_invariant:
        found["engine.tensor_parallel_size 2"] = now.weights // 2
    useful = {name: size for name, size in found.items() if size >= 32 * _MIB}
    return dict(sorted(useful.items(), key=lambda item: -item[1]))


def economical(engine: EngineConfig, ranks: int) -> EngineConfig:
    """A configuration with all the options that savings() tries."""
    return engine.model_copy(update=_economies(engine, ranks))


def _economies(engine: EngineConfig, ranks: int) -> dict[str, Any]:
    fewer = 8 if engine.max_num_seqs in (None, "auto") or int(engine.max_num_seqs) > 8 else 1
    excluded = [*(_OF_ONE_GPU if ranks > 1 else ()), *(["kv_cache_dtype"] if engine.batch_invariant else ())]
    return {name: value for name, value in (_ECONOMIES | {"max_num_seqs": fewer}).items() if name not in excluded}


_ECONOMIES: dict[str, Any] = {
    "images": False,
    "expanded_weights": "off",
    "max_num_batched_tokens": 1024,
    "kv_cache_dtype": "int8",
    "quantize_output_layer": "nf4",
    "quantize_skipped": True,
    "embedding_device": "cpu",
}
"""Options with the values that take less memory."""
_OF_ONE_GPU = ("quantize_output_layer", "quantize_skipped", "embedding_device")
"""Those that a model which is divided does not take."""
