"""Base of the sections of the configuration."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

_JSON_LIST = re.compile(r'\s*\[\s*["\]]')
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt])(?:ib)?\s*", re.IGNORECASE)


class ConfigError(Exception):
    """The configuration cannot be used; the message is one line that names the field."""


class Section(BaseModel):
    """Fields that cannot be changed; a field that does not exist is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _sizes(cls, data: Any) -> Any:
        """Bytes as 2GiB, 512 MiB or 1.5G (powers of 1024), and YAML's off, which is a boolean."""
        if not isinstance(data, dict):
            return data
        fields = {name: repr(field.annotation) for name, field in cls.model_fields.items()}
        off = {name: "off" for name, value in data.items() if value is False and "'off'" in fields.get(name, "")}
        return {name: parse_bytes(value) if name.endswith("_bytes") else value for name, value in data.items()} | off


def parse_list(value: Any) -> Any:
    """The items of a list in one string, separated by commas or as JSON; another value as it is. Raises ValueError."""
    if not isinstance(value, str):
        return value
    if _JSON_LIST.match(value):
        return json.loads(value)
    return [part.strip() for part in value.split(",") if part.strip()]


def parse_bytes(value: Any) -> Any:
    """The number of bytes that a text such as 2GiB names; another value as it is."""
    size = _SIZE.fullmatch(value) if isinstance(value, str) else None
    return value if size is None else int(float(size[1]) * 1024 ** (1 + "kmgt".index(size[2].lower())))
