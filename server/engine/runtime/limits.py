"""Limits of a step and of a sequence: what the configuration asks for, the model is made for, the memory holds."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from nf4_kernels.cuda.device import too_old
from server.config import EngineConfig
from server.engine.runtime.trials import first_line

logger = logging.getLogger(__name__)

LEAST_MODEL_LEN = 32
CPU_CACHE_BYTES = 2**30
# Larger steps are hardly faster, and every request of a step waits for its end.
TOKEN_BUDGETS = {"cpu": 256, "cuda": 4096}
# On a GPU 128 sequences decode twice as many tokens a second as 32; on CPU a step of 32 takes long enough.
SEQUENCE_LIMITS = {"cpu": 32, "cuda": 128}
AUTO_SEQUENCES = ((112 * 2**30, 1024), (60 * 2**30, 512), (36 * 2**30, 256))
"""(bytes of a GPU's memory, the most sequences of engine.max_num_seqs auto from that size on)."""
LEAST_CACHED = 256
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""Where there is an NVIDIA GPU; the latter in WSL."""


class EngineConfigError(Exception):
    """The configuration does not fit the model or the memory; the message is one line."""


class MemoryTooSmallError(EngineConfigError):
    """An EngineConfigError that options which take less memory would help."""


def resolve_device(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    """Device and dtype that the configuration means on this machine. Raises EngineConfigError."""
    device = config.device
    reason = None if device == "cpu" else _gpu_error()
    if reason is not None and device == "cuda":
        raise EngineConfigError(f"engine.device is cuda, but no GPU can be used: {reason}")
    if reason is not None:
        _say_why_cpu(reason)
    if device == "auto":
        device = "cuda" if reason is None else "cpu"
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    resolved: torch.dtype = getattr(torch, dtype)
    return torch.device(device, 0) if device == "cuda" else torch.device(device), resolved


@functools.cache  # a start asks for its device more than once
def _say_why_cpu(reason: str) -> None:
    if any(Path(file).exists() for file in _DRIVER_FILES):
        logger.warning("the model runs on the CPU, as the GPU cannot be used: %s", reason)


def _gpu_error() -> str | None:
    """Why the first GPU cannot be used; None if it can."""
    if torch.cuda.is_available():
        return too_old(torch.device("cuda", 0))
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as e:  # a driver that is too old, a torch without CUDA
        return first_line(e)
    return "torch finds none"


def token_budget(config: EngineConfig, device: torch.device) -> int:
    """Most tokens in one step on device."""
    return config.max_num_batched_tokens or TOKEN_BUDGETS[device.type]


def sequence_limit(config: EngineConfig, device: torch.device, cached_tokens: int | None = None) -> int:
    """The most sequences in one batch on device. cached_tokens: how many tokens the KV cache holds, once that is known."""
    wanted, usual = config.max_num_seqs, SEQUENCE_LIMITS[device.type]
    if wanted != "auto":
        return wanted or usual
    if device.type != "cuda":
        return usual
    return auto_sequences(torch.cuda.get_device_properties(device).total_memory, cached_tokens)


def auto_sequences(memory: int, cached_tokens: int | None) -> int:
    """Number of sequences that deserve graphs and memory for their logits on a GPU with `memory` bytes, a multiple of 64.

    Every one should find LEAST_CACHED tokens in the KV cache, or they would only preempt one another.
    """
    found = next((count for least, count in AUTO_SEQUENCES if memory >= least), SEQUENCE_LIMITS["cuda"])
    if cached_tokens is None:
        return found
    return min(found, max(SEQUENCE_LIMITS["cuda"], cached_tokens // LEAST_CACHED // 64 * 64))


def usable_threads(config: EngineConfig) -> int:
    """CPU threads to compute with: those configured, or one per core this process may use."""
    return config.threads or len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class ModelLimits:
    """The limits that the model and the cache together set."""

    max_model_len: int
    num_blocks: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    """Most sequences in one batch."""


def model_limits(model: PreTrainedModel, per_block: int, config: EngineConfig, budget: int) -> ModelLimits:
    """Limits of a cache of budget bytes; a KV block takes per_block bytes."""
    text = model.config.get_text_config()
    num_blocks = budget // per_block
    cached_tokens = num_blocks * config.block_size
    own = own_limit(text)
    wanted = config.max_model_len
    if wanted is not None and own is not None and wanted > own:
        raise EngineConfigError(f"engine.max_model_len is {wanted}, the model is made for {own} tokens")
    if wanted is not None and wanted > cached_tokens:
        raise MemoryTooSmallError(
            f"engine.max_model_len is {wanted}, the KV cache of {budget / 2**20:.0f} MiB holds {cached_tokens} tokens"
        )
    max_model_len = wanted or min(own or cached_tokens, cached_tokens)
    if own is not None and own < LEAST_MODEL_LEN:
        raise EngineConfigError(f"the model's contexts end after {own} tokens, at least {LEAST_MODEL_LEN} are needed")
    if max_model_len < LEAST_MODEL_LEN:
        raise MemoryTooSmallError(f"a KV cache of {budget} bytes does not hold {LEAST_MODEL_LEN} tokens of this model")
    # More blocks than all sequences need at full length can never be used.
    most = sequence_limit(config, model.device) * -(-max_model_len // config.block_size)
    num_blocks = min(num_blocks, most)
    sequences = sequence_limit(config, model.device, num_blocks * config.block_size)
    return ModelLimits(max_model_len, num_blocks, text.vocab_size, _eos_token_ids(model), sequences)


def own_limit(text: Any) -> int | None:
    """The longest input that the model is made for and in which a token's rotary embedding depends on its position alone.

    transformers switches dynamic and longrope frequencies for a whole batch by its longest sequence. Layers that attend
    within chunks (Llama 4) attend as all others do in contexts of one chunk, and queries that are scaled by their place
    are scaled by 1 in the first floor_scale - 1 tokens.
    """
    own: int | None = getattr(text, "max_position_embeddings", None)
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        chunk = int(text.attention_chunk_size)
        own = chunk if own is None else min(own, chunk)
    if getattr(text, "attn_temperature_tuning", False):
        unscaled = int(text.floor_scale) - 1
        own = unscaled if own is None else min(own, unscaled)
    for parameters in _rotary_parameters(text):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            original = parameters.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            own = min((length for length in (own, original) if length), default=None)
    return own


def _rotary_parameters(text: Any) -> list[dict[str, Any]]:
    """Parameters of rotary embeddings: one for the model, or one for each kind of layer."""
    given = getattr(text, "rope_parameters", None) or {}
    each = [part for part in given.values() if isinstance(part, dict)]
    return each or [given]


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Every token that the checkpoint says ends an answer (generation_config and config, which may differ)."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config()):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(ids))
