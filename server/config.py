"""The server's configuration: its fields, what they may be, and which exclude one another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

EMBEDDED_MODEL = "smollm2-135m-instruct"
ASYNC_OPTIONS_VARIABLE = "NF4_ASYNC_OPTIONS"
"""1: on CUDA, penalties, log-probabilities, grammars and the like stay within async scheduling (docs/adr/0022)."""

MetricsNames = Literal["nf4", "vllm", "both"]
"""Prefix of the metrics that vLLM has, too: nf4_, vllm: or one of each."""

KVCacheDtype = Literal["auto", "fp8_e4m3", "int8"]


class ConfigError(Exception):
    """The configuration cannot be used; the message is one line that names the field."""


def default_cache_dir() -> Path:
    """The user's cache folder for converted checkpoints: $XDG_CACHE_HOME/nf4-server or ~/.cache/nf4-server."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "nf4-server"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HttpConfig(_Section):
    """Where and how the API listens."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Of a request; beyond it, 413. Where prompts may have images, chats may be longer: see body_bytes_with_images."""
    max_queue: int = Field(default=256, ge=1)
    """Sequences accepted and not yet finished; beyond it, 429."""
    max_queue_tokens: int = Field(default=1_000_000, ge=1)
    """Tokens of the prompts of all accepted requests; beyond it, 429."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long running requests may go on after SIGTERM or SIGINT."""
    api_keys: tuple[str, ...] = ()
    """API keys, one of which every request has to show; none: no key is needed."""
    api_keys_file: Path | None = None
    """A file with more keys, one a line; empty lines and lines that begin with # do not count."""
    max_requests_per_key: int | None = Field(default=None, ge=1)
    """Requests that one key may have under way at a time."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may send requests from a browser; "*" for all."""
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    request_timeout_s: float | None = Field(default=None, gt=0)
    """How long one request may take; then it ends with an error. A client may ask for less."""
    stalled_client_timeout_s: float | None = Field(default=120.0, gt=0)
    """How long a client may leave a stream unread; then it counts as gone (Linux)."""
    header_timeout_s: float | None = Field(default=20.0, gt=0)
    """How long a request's head may take to arrive; then 408."""
    body_timeout_s: float | None = Field(default=30.0, gt=0)
    """How long a request's body may make no progress; then 408."""
    max_header_bytes: int = Field(default=64 * 2**10, ge=1024)
    """Bytes of a request's target and headers together; beyond it, 431."""
    max_headers: int = Field(default=128, ge=8)
    """Headers of a request; beyond it, 431."""
    max_connections: int | None = Field(default=4096, ge=1)
    """Connections at a time; beyond it idle ones are closed, then new ones get 503."""
    api_processes: int = Field(default=1, ge=1, le=64)
    """Processes that answer HTTP beside one engine; more than 1 needs Linux."""
    metrics_names: MetricsNames = "nf4"
    """Names under which /metrics gives the metrics that vLLM has, too."""
    unknown_options: Literal["warn", "refuse"] = "warn"
    """Fields of a request that the server does not know: named in X-Ignored-Options, or answered with 400."""
    response_store: int = Field(default=0, ge=0)
    """Answers of /v1/responses kept in memory for previous_response_id; 0: none."""
    max_images: int = Field(default=16, ge=1)
    """Images of one request; beyond it, 400."""
    max_image_bytes: int = Field(default=20 * 2**20, ge=1024)
    """Of one encoded image; beyond it, 400."""
    max_image_pixels: int = Field(default=2**25, ge=1)
    """Of one image; beyond it, 400."""
    image_hosts: tuple[str, ...] = ()
    """Hosts that images may be fetched from: "name", "name:port", "*.name"; none: images come in requests only."""
    image_timeout_s: float = Field(default=10.0, gt=0)
    """How long fetching an image may take."""
    any_model: bool = False
    """Whether the model answers under any name that is asked for; else an unknown one gets 404."""

    @field_validator("api_keys", "cors_origins", "image_hosts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """One string, as environment variables have it: separated by commas."""
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _agrees(self) -> HttpConfig:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file belong together")
        if self.api_processes > 1 and self.response_store:
            raise ValueError("response_store keeps answers in one process; api_processes has to be 1 for it")
        return self

    @property
    def body_bytes_with_images(self) -> int:
        """Bytes of a chat where prompts may have images: max_body_bytes, or what two of the largest take in base64."""
        return max(self.max_body_bytes, 2 * self.max_image_bytes * 4 // 3 + 2**20)

    def keys(self) -> tuple[str, ...]:
        """All API keys. Raises ConfigError when the file cannot be read or holds none."""
        if self.api_keys_file is None:
            return self.api_keys
        try:
            lines = self.api_keys_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"http.api_keys_file: {self.api_keys_file}: {e}") from e
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise ConfigError(f"http.api_keys_file: {self.api_keys_file}: there is no key in it")
        return (*self.api_keys, *keys)


class LoraModule(_Section):
    """A LoRA adapter: the name that requests ask for as their model, and its folder."""

    name: str = Field(min_length=1, max_length=256)
    path: Path

    @field_validator("path")
    @classmethod
    def _expand_user(cls, value: Path) -> Path:
        return value.expanduser()


class EngineConfig(_Section):
    """How the engine runs the model."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
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
    kv_cache_bytes: int | None = Field(default=None, ge=2**20)
    """Memory for the KV cache; None: 1 GiB on CPU, on CUDA what a largest step leaves free, less 3 % of the memory."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """CUDA: keys and values in 8 bits, with a scale for each token and key head, for nearly twice the tokens.

    auto: in 16 bits, the activations' type.
    """
    expanded_weights: Literal["auto", "off"] | Annotated[int, Field(ge=0)] = "auto"
    """CUDA: bytes for 16-bit copies of NF4 weights, which steps of more than 128 tokens multiply by.

    auto: up to a quarter of what the weights leave free of the memory, or of what kv_cache_bytes leaves of that.
    """
    enable_prefix_caching: bool = True
    """Whether the beginnings of prompts that the KV cache already holds are not computed again."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; None takes all cores this process may use."""
    enforce_eager: bool = False
    """Skip compilation and CUDA graphs: a quick start, slower decoding."""
    batch_invariant: bool = False
    """CUDA: a sequence's logits are the same bits whatever else is in its batch. Slower, most of all prefill."""
    embeddings: bool | None = None
    """Whether /v1/embeddings answers. None: for embedding models, by sentence-transformers' files in their folders."""
    images: bool | None = None
    """Whether prompts may have images, for which the model's image tower is loaded. None: where that can be."""
    speculation: Literal["off", "lookup", "draft"] = "off"
    """Guess several tokens a step and check them: lookup takes guesses from the request's own prompt and answer, draft from
    draft_model."""
    draft_model: str | None = None
    """With speculation draft: a smaller model with the same tokenizer; a folder, a hub id or the embedded model's name."""
    lora_modules: tuple[LoraModule, ...] = ()
    """Adapters that are served from the start."""
    max_loras: int | None = Field(default=None, ge=1, le=256)
    """Adapters loaded at a time; None: as many as lora_modules has, and 4 more with allow_runtime_lora."""
    max_lora_rank: int | None = Field(default=None, ge=1, le=1024)
    """Largest rank of an adapter; None: the largest among lora_modules, at least 16 with allow_runtime_lora."""
    allow_runtime_lora: bool = False
    """Whether /v1/load_lora_adapter and /v1/unload_lora_adapter are offered."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random NF4 weights for the folder's config.json, for benchmarks."""
    start_timeout_s: float = Field(default=1800.0, gt=0)
    standby: bool | None = None
    """Keep a process that has imported what an engine needs, for when the engine dies; None: on CPU."""

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _parse_lora_modules(cls, value: Any) -> Any:
        """One string, as environment variables have it: name=path, separated by commas."""
        if not isinstance(value, str):
            return value
        pairs = [part.strip().partition("=") for part in value.split(",") if part.strip()]
        return tuple({"name": name, "path": path} for name, _, path in pairs)

    @model_validator(mode="after")
    def _drafts_have_a_model(self) -> EngineConfig:
        if self.speculation == "draft" and self.draft_model is None:
            raise ValueError("speculation is draft, and draft_model does not say which model guesses")
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
            raise ValueError(
                "kv_cache_dtype has to be auto with batch_invariant, whose steps FlashInfer's kernels compute"
            )
        return self

    @model_validator(mode="after")
    def _of_one_gpu(self) -> EngineConfig:
        if self.tensor_parallel_size != 1:
            for name, wanted in (("speculation", self.speculation != "off"), ("embeddings", bool(self.embeddings))):
                if wanted:
                    raise ValueError(f"{name} works on one GPU only; tensor_parallel_size has to be 1 for it")
        return self

    @model_validator(mode="after")
    def _enough_loras(self) -> EngineConfig:
        names = [module.name for module in self.lora_modules]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"lora_modules names {twice!r} twice")
        if self.max_loras is not None and self.max_loras < len(names):
            raise ValueError(f"max_loras is {self.max_loras}, but lora_modules has {len(names)}")
        return self

    @property
    def lora_slots(self) -> int:
        """How many adapters there is room for; 0: the model runs without."""
        if not self.lora_modules and not self.allow_runtime_lora:
            return 0
        return self.max_loras or len(self.lora_modules) + (4 if self.allow_runtime_lora else 0)


class Config(_Section):
    """The whole configuration."""

    model: str = EMBEDDED_MODEL
    """A local folder, a hub id, or "smollm2-135m-instruct" for the embedded model."""
    served_model_name: tuple[str, ...] | None = None
    """Names that clients may use for the model; the first is the one that metrics and the log have."""
    cache_dir: Path = Field(default_factory=default_cache_dir)
    generation_config: Literal["auto", "none"] = "auto"
    """Where sampling parameters that a request leaves out come from: the model's generation_config.json, or OpenAI's API."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
    otlp_traces_endpoint: str | None = None
    http: HttpConfig = HttpConfig()
    engine: EngineConfig = EngineConfig()

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        """One string: names separated by commas."""
        if isinstance(value, str):
            value = [name.strip() for name in value.split(",") if name.strip()]
        return value or None

    @field_validator("cache_dir")
    @classmethod
    def _expand_user(cls, value: Path) -> Path:
        return value.expanduser()

    @model_validator(mode="after")
    def _adapter_names(self) -> Config:
        taken = next((m.name for m in self.engine.lora_modules if m.name in self.model_names), None)
        if taken is not None:
            raise ValueError(f"engine.lora_modules: {taken!r} is the model's own name")
        return self

    @property
    def model_name(self) -> str:
        """The model's first name."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may use for the model."""
        return self.served_model_name or (self.model,)
