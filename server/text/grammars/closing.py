"""Schemas of functions' parameters without room for arguments that they do not name.

JSON schemas leave objects open, and a small model then goes on with arguments of its own until it is cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# An object that has one of these gets properties from elsewhere, too, or says itself which others it allows.
_OPEN = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if"}
)
# What joins schemas, which would forbid each other's properties if each were closed.
_JOINING = frozenset({"allOf", "if", "dependentSchemas"})


def close_objects(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which every object that names its properties allows no others; unchanged where schemas are joined."""
    return dict(parameters) if _joins(parameters) else _closed(parameters)


def _joins(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(_joins(item) for item in schema)
    if not isinstance(schema, Mapping):
        return False
    joined = bool(_JOINING & schema.keys()) or ("properties" in schema and "$ref" in schema)
    return joined or any(_joins(value) for value in schema.values())


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for keyword in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(keyword), dict):
            closed[keyword] = {name: _closed(inner) for name, inner in schema[keyword].items()}
    for keyword in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(schema.get(keyword), list) and "properties" not in schema:
            closed[keyword] = [_closed(inner) for inner in schema[keyword]]
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    if isinstance(schema.get("properties"), dict) and not _OPEN & schema.keys():
        closed["additionalProperties"] = False
    return closed
