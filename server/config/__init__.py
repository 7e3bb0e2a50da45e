"""The server's configuration: its fields, what they may be, and which exclude one another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from server.config.engine import (
    WRITTEN_LAYERS_VARIABLE,
    EngineConfig,
    KVCacheDtype,
    LoraModule,
)
from server.config.http import HttpConfig, MetricsNames
from server.config.section import ConfigError, Section, parse_list

__all__ = [
    "EMBEDDED_MODEL",
    "WRITTEN_LAYERS_VARIABLE",
    "Config",
    "ConfigError",
    "EngineConfig",
    "HttpConfig",
    "KVCacheDtype",
    "LoraModule",
    "MetricsNames",
    "default_cache_dir",
]

EMBEDDED_MODEL = "smollm2-135m-instruct"


def default_cache_dir() -> Path:
    """The user's cache folder for converted checkpoints: $XDG_CACHE_HOME/nf4-server or ~/.cache/nf4-server."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "nf4-server"


class Config(Section):
    """The whole configuration."""

    model: str = EMBEDDED_MODEL
    """A local folder, a hub id, or "smollm2-135m-instruct" for the embedded model."""
    served_model_name: tuple[str, ...] | None = None
    """Names that clients may use for the model; the first is the one that metrics and the log have."""
    cache_dir: Path = Field(default_factory=default_cache_dir)
    """Folder of converted checkpoints."""
    generation_config: Literal["auto", "none"] = "auto"
    """Source of sampling parameters that a request leaves out: the model's generation_config.json, or OpenAI's API."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """debug, info, warning or error."""
    log_format: Literal["console", "json"] = "console"
    """console or json."""
    otlp_traces_endpoint: str | None = None
    """Address to which OpenTelemetry spans are sent, over OTLP/HTTP; needs the extra tracing."""
    http: HttpConfig = HttpConfig()
    engine: EngineConfig = EngineConfig()

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        return parse_list(value) or None

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
        """The names clients may use for the model: those configured, else its own, and a folder's last part."""
        if self.served_model_name:
            return self.served_model_name
        folder = Path(self.model).expanduser()
        last = os.path.basename(os.path.abspath(folder)) if folder.is_dir() else ""
        return (self.model, last) if last and last != self.model else (self.model,)
