"""The section http: where and how the API listens, and who may ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from server.config.section import ConfigError, Section, parse_list

MetricsNames = Literal["nf4", "vllm", "both"]
"""Prefix of the metrics that vLLM has, too: nf4_, vllm: or one of each."""


class HttpConfig(Section):
    """Address, limits and behaviour of the API."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Bytes of a request; beyond it, 413. If prompts may have images, a chat may be as long as two of the largest."""
    max_queue: int = Field(default=256, ge=1)
    """Sequences accepted and not yet finished; beyond it, 429."""
    max_queue_tokens: int = Field(default=1_000_000, ge=1)
    """Tokens of the prompts of all accepted requests; beyond it, 429."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """Time that running requests may go on after SIGTERM or SIGINT."""
    api_keys: tuple[str, ...] = ()
    """API keys, one of which every request has to show; none: no key is needed."""
    api_keys_file: Path | None = None
    """A file with more keys, one a line; empty lines and lines that begin with # do not count."""
    max_requests_per_key: int | None = Field(default=None, ge=1)
    """Requests that one key may have under way at a time."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may send requests from a browser; "*" for all."""
    tls_cert_file: Path | None = None
    """A certificate in PEM, for HTTPS; tls_key_file belongs to it."""
    tls_key_file: Path | None = None
    """The certificate's key in PEM."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Time that one request may take; then it ends with an error. A client may ask for less."""
    stalled_client_timeout_s: float | None = Field(default=120.0, gt=0)
    """Time that a client may leave a stream unread; then it counts as gone (Linux)."""
    header_timeout_s: float | None = Field(default=20.0, gt=0)
    """Time that a request's head may take to arrive; then 408."""
    body_timeout_s: float | None = Field(default=30.0, gt=0)
    """Time that a request's body may make no progress; then 408."""
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
    """Answers of /v1/responses that are kept in memory for previous_response_id; 0: none."""
    max_images: int = Field(default=16, ge=1)
    """Images of one request; beyond it, 400."""
    max_image_bytes: int = Field(default=20 * 2**20, ge=1024)
    """Bytes of one encoded image; beyond it, 400."""
    max_image_pixels: int = Field(default=2**25, ge=1)
    """Pixels of one image; beyond it, 400."""
    image_hosts: tuple[str, ...] = ()
    """Hosts that images may be fetched from: "name", "name:port", "*.name"; none: images come in requests only."""
    image_timeout_s: float = Field(default=10.0, gt=0)
    """Time that fetching an image may take."""
    any_model: bool = False
    """Whether the model answers under any name that is asked for; else an unknown one gets 404."""

    @field_validator("api_keys", "cors_origins", "image_hosts", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return parse_list(value)

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
