"""Sources of the configuration: config.yaml, then NF4_* environment variables, then flags; the last one wins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from server.config import WRITTEN_LAYERS_VARIABLE, Config, ConfigError
from server.config.flags import did_you_mean, dotted_names

KERNEL_VARIABLES = frozenset({"NF4_CPU_ISA", "NF4_CUDA_ARCHS", "NF4_KERNELS_VLLM", "NF4_POSE_AS", "NF4_TUNE"})
"""Environment variables with our prefix that belong to nf4_kernels."""
_NO_FIELDS = {*KERNEL_VARIABLES, WRITTEN_LAYERS_VARIABLE}


def load_config(
    path: Path | None, overrides: dict[str, Any] | None = None, flags: dict[str, str] | None = None
) -> Config:
    """Read config.yaml and lay environment variables and overrides (dotted keys: "http.port") over it.

    Environment: NF4_MODEL, NF4_HTTP__PORT, ... (double underscore between section and field). flags: where each override
    comes from. Raises ConfigError with one line that names the source (file and line, variable, flag), field and value.
    """
    data: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if path is not None:
        data, sources = _read(path)
    for key, value in os.environ.items():
        if key.startswith("NF4_") and key not in _NO_FIELDS and value:
            name = key.removeprefix("NF4_").lower().replace("__", ".")
            _set(data, name, value, sources)
            sources[name] = key
    for key, value in (overrides or {}).items():
        if value is not None:
            _set(data, key, value, sources)
            sources[key] = (flags or {}).get(key, "")
    try:
        return Config.model_validate(data)
    except ValidationError as e:
        raise ConfigError(_explained(e.errors()[0], sources)) from e


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """A file's mapping, and the place of each of its fields by dotted name. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        loaded = yaml.safe_load(text)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(e).split())}") from e
    if loaded is not None and not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected a mapping at the top, got {type(loaded).__name__}")
    return loaded or {}, {name: f"{path}:{line}" for name, line in _lines(yaml.compose(text), "")}


def _lines(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """The dotted name of every key of a mapping, and its line."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            yield name, key.start_mark.line + 1
            yield from _lines(value, f"{name}.")


def _explained(error: ErrorDetails, sources: dict[str, str]) -> str:
    """A finding of pydantic in one line."""
    loc = [str(part) for part in error["loc"]]
    name = ".".join(loc)
    source = next((sources[key] for i in range(len(loc), 0, -1) if (key := ".".join(loc[:i])) in sources), "")
    where = f"{source}: " if source else ""
    if error["type"] == "extra_forbidden":
        return f"{where}{name}: there is no such field{did_you_mean(name, dotted_names())}"
    value = error["input"]
    got = f", got {str(value)[:100]!r}" if isinstance(value, str | int | float) else ""
    said = error["msg"].removeprefix("Value error, ")
    if error["type"] == "int_parsing" and name.endswith("_bytes"):
        said = "bytes are a number, or written as 2GiB, 512MiB or 64KiB"
    return f"{where}{name}: {said}{got}"


def _set(data: dict[str, Any], dotted: str, value: Any, sources: dict[str, str]) -> None:
    *sections, field = dotted.split(".")
    for section in sections:
        inner = data.get(section)
        if inner is None:
            inner = data[section] = {}
        elif not isinstance(inner, dict):
            place = sources.get(section, "")
            raise ConfigError(f"{place}: {section}: expected a mapping, got {str(inner)[:100]!r}".removeprefix(": "))
        data = inner
    data[field] = value
