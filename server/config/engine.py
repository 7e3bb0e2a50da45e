"""The section engine: how the model is run, and which of its options exclude one another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from server.config.section import Section, parse_list

WRITTEN_LAYERS_VARIABLE = "NF4_WRITTEN_LAYERS"
"""0: decoder layers run by transformers' own code even if they could be written ones."""

KVCacheDtype = Literal["auto", "fp8_e4m3", "int8"]
LoraExtra = Literal["dora", "head", "embedding"]


class LoraModule(Section):
    """A LoRA adapter: the name that requests ask for as their model, and its folder."""

    name: str = Field(min_length=1, max_length=256)
    path: Path

    @field_validator("path")
    @classmethod
    def _expand_user(cls, value: Path) -> Path:
        return value.expanduser()


class EngineConfig(Section):
    """Settings of the engine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if there is one that can be used."""
    tensor_parallel_size: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs that compute the model together, each with a part of every weight. auto: the fewest that hold it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on CPU, bfloat16 on CUDA."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Longest prompt + answer in tokens; None takes the model's own limit, cut to what the KV cache holds."""
    max_num_seqs: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most sequences in one batch. None: 32 on CPU, 128 on CUDA. auto: on CUDA up to 1024, by the memory."""
    max_num_batched_tokens: int | None = Field(default=None, ge=16)
    """Token budget of one step; longer prompts are prefilled in chunks. None: 256 on CPU, 4096 on CUDA."""
    max_prefill_ms: float | None = Field(default=None, gt=0)
    """Most milliseconds of a step that computes prompts while other sequences decode, which bounds the gaps in streams.

    Chunks of prompts are made short enough for it, by the measured speed. None: only max_num_batched_tokens bounds them.
    """
    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens of a block of the KV cache."""
    kv_cache_bytes: int | None = Field(default=None, ge=2**20)
    """Memory for the KV cache; None: 1 GiB on CPU, on CUDA what a largest step leaves free, less 3 % of the memory and, if
    the GPU drives a screen, 0.5 GiB."""
    state_snapshot_bytes: int | None = Field(default=None, ge=0)
    """Hybrid models: memory for snapshots of states, without which the beginnings of prompts are computed again.

    None: half of what the states of running sequences take, at least two snapshots.
    """
    state_snapshot_host_bytes: int = Field(default=0, ge=0)
    """Hybrid models: host memory of each rank, pinned with a GPU, for snapshots that the device has no room for."""
    state_snapshot_tokens: int = Field(default=1024, ge=16)
    """Hybrid models: a snapshot is taken every so many tokens of a prompt, and at its end."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """CUDA: keys and values in 8 bits, with a scale for each token and key head, for nearly twice the tokens.

    auto: in 16 bits, the activations' type.
    """
    expanded_weights: Literal["auto", "off"] | Annotated[int, Field(ge=0)] = "auto"
    """CUDA: bytes for 16-bit copies of NF4 weights, which steps of more than 128 tokens multiply by.

    auto: up to a quarter of the memory that the weights leave free, after a KV cache of 32768 tokens; with kv_cache_bytes,
    up to half of what the weights and the cache leave.
    """
    quantize_output_layer: Literal["auto", "off", "nf4"] = "auto"
    """Whether an output layer in 16 bit becomes NF4 while loading: a quarter of its bytes, and other log-probabilities.

    auto: on CUDA, if the KV cache would be too small otherwise, which the log says.
    """
    quantize_skipped: bool = False
    """Whether projections that an NF4 checkpoint has in 16 bit become NF4 while loading; a quarter of their bytes, and other
    answers."""
    embedding_device: Literal["auto", "cpu"] = "auto"
    """cpu: the embedding stays in pinned host memory, from which a GPU reads a row for each token. auto: it is where the
    model is."""
    enable_prefix_caching: bool = True
    """Whether the beginnings of prompts that the KV cache already holds are not computed again."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; None takes all cores this process may use."""
    enforce_eager: bool = False
    """Skip CUDA graphs and written layers, so that transformers' own code computes: a quick start, slower decoding."""
    batch_invariant: bool = False
    """CUDA: a sequence's logits are the same bits whatever else is in its batch. Slower, most of all prefill."""
    embeddings: bool | None = None
    """Whether /v1/embeddings answers. None: for embedding models, by sentence-transformers' files in their folders."""
    images: bool | None = None
    """Whether prompts may have images, for which the model's image tower is loaded. None: where that can be."""
    speculation: Literal["off", "lookup", "draft"] = "off"
    """Draft tokens, which a step verifies together: lookup takes them from the request's own prompt and answer, draft from
    draft_model."""
    draft_model: str | None = None
    """With speculation draft: a smaller model with the same tokenizer; a folder, a hub id or the embedded model's name."""
    lora_modules: tuple[LoraModule, ...] = ()
    """Adapters that are served from the start: name=folder."""
    max_loras: int | None = Field(default=None, ge=1, le=256)
    """Adapters loaded at a time; None: as many as lora_modules has, and 4 more with allow_runtime_lora."""
    max_lora_rank: int | None = Field(default=None, ge=1, le=1024)
    """Largest rank of an adapter; None: the largest among lora_modules, at least 16 with allow_runtime_lora."""
    lora_extra: tuple[LoraExtra, ...] = ()
    """Room for more than plain LoRA in adapters that come at run time: dora (DoRA and trained biases), head (changed output
    layers), embedding (changed embeddings)."""
    allow_runtime_lora: bool = False
    """Whether /v1/load_lora_adapter and /v1/unload_lora_adapter are offered."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random NF4 weights for the folder's config.json, for benchmarks."""
    start_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that the engine may take to start; beyond them, the server ends."""
    standby: bool | None = None
    """Keep a process that has imported what an engine needs, for when the engine dies; None: on CPU."""

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _parse_lora_modules(cls, value: Any) -> Any:
        """One string, as environment variables have it: name=path, separated by commas."""
        if not isinstance(value, str):
            return value
        pairs = [part.partition("=") for part in parse_list(value)]
        return tuple({"name": name, "path": path} for name, _, path in pairs)

    @field_validator("lora_extra", mode="before")
    @classmethod
    def _parse_lora_extra(cls, value: Any) -> Any:
        return parse_list(value)

    @model_validator(mode="after")
    def _drafts_have_a_model(self) -> EngineConfig:
        if self.speculation == "draft" and self.draft_model is None:
            raise ValueError("speculation is draft, and draft_model does not say which model proposes tokens")
        if self.draft_model is not None and self.speculation != "draft":
            raise ValueError(f"draft_model is set, and speculation is {self.speculation}; it has to be draft")
        return self

    @model_validator(mode="after")
    def _embeddings_vary(self) -> EngineConfig:
        if self.embeddings and self.batch_invariant:
            raise ValueError("embeddings do not keep to batch_invariant; one of both has to be off")
        return self

    @model_validator(mode="after")
    def _kept_in_16_bits(self) -> EngineConfig:
        if self.batch_invariant and self.kv_cache_dtype != "auto":
            raise ValueError("kv_cache_dtype has to be auto with batch_invariant")
        return self

    @model_validator(mode="after")
    def _enough_loras(self) -> EngineConfig:
        names = [module.name for module in self.lora_modules]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"lora_modules names {twice!r} twice")
        if self.lora_extra and not self.lora_slots:
            raise ValueError("lora_extra is set, but allow_runtime_lora is false and lora_modules is empty")
        if self.lora_extra and self.tensor_parallel_size not in (1, "auto"):
            raise ValueError("lora_extra works on one GPU only, and tensor_parallel_size is above 1")
        if self.max_loras is not None and self.max_loras < len(names):
            raise ValueError(f"max_loras is {self.max_loras}, but lora_modules has {len(names)}")
        return self

    @property
    def lora_slots(self) -> int:
        """Number of adapters that there is room for; 0: the model runs without."""
        if not self.lora_modules and not self.allow_runtime_lora:
            return 0
        return self.max_loras or len(self.lora_modules) + (4 if self.allow_runtime_lora else 0)
