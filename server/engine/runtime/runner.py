"""Runs the model: a step's chunks in, its sequences' next tokens out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from server.checkpoint.base import Progress
from server.config import EngineConfig
from server.engine.runtime.attention.base import LayerShape, attending
from server.engine.runtime.attention.factory import create_backend
from server.engine.runtime.attention.flashinfer import FlashInferBackend
from server.engine.runtime.attention.probe import probe_layers
from server.engine.runtime.batch import build_batch
from server.engine.runtime.graphs import DecodeGraphs, ladder
from server.engine.runtime.sampling import Sampled, sample
from server.engine.scheduling.scheduler import Step

CPU_CACHE_BYTES = 2**30
CUDA_CACHE_SHARE = 0.9


class EngineConfigError(Exception):
    """The configuration does not fit the model or the memory; the message is one line."""


def resolve_device(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    """Device and dtype that the configuration means on this machine."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineConfigError("engine.device is cuda, but torch finds no usable GPU")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    resolved: torch.dtype = getattr(torch, dtype)
    return torch.device(device, 0) if device == "cuda" else torch.device(device), resolved


def usable_threads(config: EngineConfig) -> int:
    """CPU threads to compute with: those configured, or one per core this process may use."""
    return config.threads or len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class ModelLimits:
    """What the model and the cache together allow."""

    max_model_len: int
    num_blocks: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class ModelRunner:
    """A transformers model over a paged cache. Not thread-safe."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self._model = model
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._block_size = config.block_size
        if self._device.type == "cuda":
            from server.engine.runtime.projections import replace_projections

            replace_projections(model)
        shapes, options = probe_layers(model)
        self.limits = _limits(model, shapes, config, self._device, self._dtype)
        self._backend = create_backend(
            shapes, options, self.limits.num_blocks, config.block_size, self._dtype, self._device
        )
        self._graphs: DecodeGraphs | None = None

    def prepare(self, config: EngineConfig, progress: Progress) -> None:
        """Compile and capture decode steps where the device has CUDA graphs (engine.enforce_eager: not)."""
        if isinstance(self._backend, FlashInferBackend) and not config.enforce_eager:
            graphs = DecodeGraphs(self._model, self._backend, self._block_size)
            with torch.inference_mode():
                graphs.capture(ladder(config.max_num_seqs), progress)
            self._graphs = graphs

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations."""
        return self._dtype

    @property
    def kernels(self) -> str:
        """Which NF4 kernels run, in words."""
        return "bitsandbytes"

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """Logits [len(step.sampled), vocabulary] in float32; writes the cache."""
        batch = build_batch(step, self._block_size, self._device)
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch).float()
        self._backend.begin(batch)
        with attending(self._backend):
            output: Any = self._model(
                input_ids=batch.ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=batch.sampled_rows,
            )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    @torch.inference_mode()
    def execute(self, step: Step) -> list[Sampled]:
        """Compute a step: one result for each of step.sampled, in order."""
        logits = self.forward(step)
        sampled = step.sampled
        return sample(logits, [chunk.sequence for chunk in sampled]) if sampled else []


def _limits(
    model: PreTrainedModel, shapes: list[LayerShape], config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> ModelLimits:
    text = model.config.get_text_config()
    budget = config.kv_cache_bytes or _default_cache_bytes(device)
    per_block = config.block_size * sum(shape.bytes_per_token(dtype.itemsize) for shape in shapes)
    num_blocks = budget // per_block
    cached_tokens = num_blocks * config.block_size
    own: int | None = getattr(text, "max_position_embeddings", None)
    own = _rope_limit(text, own)
    wanted = config.max_model_len
    if wanted is not None and own is not None and wanted > own:
        raise EngineConfigError(f"engine.max_model_len is {wanted}, the model is made for {own} tokens")
    if wanted is not None and wanted > cached_tokens:
        raise EngineConfigError(
            f"engine.max_model_len is {wanted}, the KV cache of {budget / 2**20:.0f} MiB holds {cached_tokens} tokens"
        )
    max_model_len = wanted or min(own or cached_tokens, cached_tokens)
    if max_model_len < 2:
        raise EngineConfigError(f"a KV cache of {budget} bytes does not hold one block of {per_block} bytes")
    # More than every sequence at full length can never be used.
    most = config.max_num_seqs * -(-max_model_len // config.block_size)
    return ModelLimits(max_model_len, min(num_blocks, most), text.vocab_size, _eos_token_ids(model))


def _rope_limit(text: Any, own: int | None) -> int | None:
    """Longest input at which the rotary embedding of a token does not depend on the batch it is in.

    transformers switches dynamic and longrope frequencies for a whole batch by its longest sequence.
    """
    parameters = getattr(text, "rope_parameters", None) or {}
    if parameters.get("rope_type") in ("dynamic", "longrope"):
        original = parameters.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        return original or own
    return own


def _default_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_CACHE_SHARE)
    return CPU_CACHE_BYTES


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Every token that the checkpoint says ends an answer (generation_config and config, which may differ)."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config()):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(ids))
