"""Where the configuration comes from: config.yaml, then NF4_* environment variables, then flags; the last one wins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from server.config import ASYNC_OPTIONS_VARIABLE, WRITTEN_LAYERS_VARIABLE, Config, ConfigError

KERNEL_VARIABLES = frozenset({"NF4_CPU_ISA", "NF4_CUDA_ARCHS"})
"""Environment variables with our prefix that belong to nf4_kernels."""
_NO_FIELDS = {*KERNEL_VARIABLES, ASYNC_OPTIONS_VARIABLE, WRITTEN_LAYERS_VARIABLE}


def load_config(path: Path | None, overrides: dict[str, Any] | None = None) -> Config:
    """Read config.yaml and lay environment variables and overrides (dotted keys: "http.port") over it.

    Environment: NF4_MODEL, NF4_HTTP__PORT, ... (double underscore between section and field).
    Raises ConfigError with one line that names the file or field.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as e:
            raise ConfigError(f"{path}: {e.strerror}") from e
        except (yaml.YAMLError, UnicodeDecodeError) as e:
            raise ConfigError(f"{path}: not valid YAML: {' '.join(str(e).split())}") from e
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"{path}: expected a mapping at the top, got {type(loaded).__name__}")
        data = loaded or {}
    for key, value in os.environ.items():
        if key.startswith("NF4_") and key not in _NO_FIELDS and value:
            _set(data, key.removeprefix("NF4_").lower().replace("__", "."), value)
    for key, value in (overrides or {}).items():
        if value is not None:
            _set(data, key, value)
    try:
        return Config.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        raise ConfigError(f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}") from e


def _set(data: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, field = dotted.split(".")
    for section in sections:
        inner = data.get(section)
        if not isinstance(inner, dict):
            inner = data[section] = {}
        data = inner
    data[field] = value
