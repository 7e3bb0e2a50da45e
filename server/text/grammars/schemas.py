"""JSON schemas as llguidance takes them: without what excludes nothing, with regular expressions that it keeps to.

llguidance (1.9) refuses a schema with a keyword that it does not know, whatever the keyword's value. A schema that is
mended here allows the same documents, or fewer if a bound is beyond llguidance's numbers or a union's tag is optional.
What does exclude something and cannot be expressed is still refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from server.text.grammars.regexes import mend_regex

KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
"""Values of "format" that llguidance enforces. Any other is an annotation, as JSON Schema has it."""

_DATA = frozenset({"const", "enum", "default", "examples", "required", "discriminator", "x-guidance"})
"""Keywords whose values are no schemas."""
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Keywords whose values are schemas by name."""
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})

_BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_LARGEST_INTEGER, _LARGEST_NUMBER = {-1: 2**63 - 1024, 1: 2**63 - 1}, {-1: 2**62, 1: 2**62}
"""The largest bounds that llguidance takes, by the sign of what they bound. It keeps them in float64."""
_LARGEST_FLOAT = 1.7e308

Tags = dict[int, set[str]]
"""Properties that tell a union's members apart, by the id() of each member; by that of the list of members, none."""


def mend_schema(schema: Any) -> Any:
    """A copy of a schema for llguidance. Raises RecursionError for one nested too deeply."""
    tags: Tags = {}
    for inner, document in _schemas(schema, schema):
        if isinstance(inner.get("oneOf"), list) and "anyOf" not in inner:
            _add_tag(inner["oneOf"], document, tags)
    return _mended(schema, tags)


def schema_literals(schema: Any) -> Iterator[str]:
    """JSON texts of the property names, and of the values of const and enum, in a schema and all within it."""
    for inner, _ in _schemas(schema, schema):
        for key in ("properties", "required", "const", "enum"):
            if key in inner:
                names = list(inner[key]) if key == "properties" and isinstance(inner[key], dict) else inner[key]
                yield json.dumps(names, ensure_ascii=False)


def _schemas(schema: Any, document: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """A schema and all within it, each with the document that its references are within."""
    if isinstance(schema, list):
        for item in schema:
            yield from _schemas(item, document)
    elif isinstance(schema, dict):
        document = schema if "$id" in schema else document
        yield schema, document
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, dict):
                yield from _schemas(list(value.values()), document)
            elif key not in _DATA:
                yield from _schemas(value, document)


def _mended(schema: Any, tags: Tags) -> Any:
    if isinstance(schema, list):
        return [_mended(item, tags) for item in schema]
    if not isinstance(schema, dict):
        return schema
    mended: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            mended[key] = value
        elif key == "pattern" and isinstance(value, str):
            mended[key] = mend_regex(value)
        elif key in _BY_NAME and isinstance(value, dict):
            inner = {name: _mended(named, tags) for name, named in value.items()}
            mended[key] = {mend_regex(name): v for name, v in inner.items()} if key == "patternProperties" else inner
        elif key == "oneOf" and id(value) in tags:
            mended["anyOf"] = _mended(value, tags)  # no document has two of the tags
        elif key == "$dynamicAnchor":
            mended["$anchor"] = value  # without $dynamicRef, which is refused, it is no more than that
        else:
            mended[key] = _mended(value, tags)
    if tags.get(id(schema)):
        required = schema.get("required")
        known = required if isinstance(required, list) else []
        mended["required"] = [*known, *sorted(tags[id(schema)] - set(map(str, known)))]
    _bound(mended)
    mended = {key: value for key, value in mended.items() if key not in _IDLE or not _IDLE[key](value, mended)}
    return False if "not" in mended and _allows_all(mended["not"]) else mended


def _bound(schema: dict[str, Any]) -> None:
    """Put bounds within llguidance's numbers, never beyond what they were; leave out those of all floating-point numbers."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    whole = "integer" in kinds and "number" not in kinds
    for key, sign in _BOUNDS.items():
        value, largest = schema.get(key), (_LARGEST_INTEGER if whole else _LARGEST_NUMBER)[sign]
        if isinstance(value, bool) or not isinstance(value, int | float) or sign * value <= largest:
            continue
        if whole or sign * value < _LARGEST_FLOAT:
            schema[key] = sign * largest
        else:
            del schema[key]


def _allows_all(schema: Any, kind: str | None = None) -> bool:
    """Whether a schema allows every value (of a type)."""
    if not isinstance(schema, dict):
        return schema is True
    kinds = schema.get("type")
    of_kind = kind is not None and kind in (kinds if isinstance(kinds, list) else [kinds])
    return all(key in _ANNOTATIONS or (key == "type" and of_kind) for key in schema)


def _needs_nothing(dependencies: Any, _: Mapping[str, Any]) -> bool:
    return isinstance(dependencies, dict) and all(v == [] or _allows_all(v) for v in dependencies.values())


def _counts_nothing(_: Any, schema: Mapping[str, Any]) -> bool:
    return "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema)


_IDLE: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "format": lambda value, _: isinstance(value, str) and value not in KNOWN_FORMATS,
    "propertyNames": lambda value, _: _allows_all(value, "string"),
    "not": lambda value, _: value is False,
    "uniqueItems": lambda value, schema: value is False or schema.get("maxItems") in (0, 1),
    "unevaluatedProperties": lambda value, _: _allows_all(value),
    "unevaluatedItems": lambda value, _: _allows_all(value),
    "dependentRequired": _needs_nothing,
    "dependentSchemas": _needs_nothing,
    "dependencies": _needs_nothing,
    "contains": _counts_nothing,
    "minContains": _counts_nothing,
    "maxContains": _counts_nothing,
    "if": lambda _, schema: all(_allows_all(schema.get(key, True)) for key in ("then", "else")),
    "then": lambda value, schema: "if" not in schema or _allows_all(value),
    "else": lambda value, schema: "if" not in schema or _allows_all(value),
    "$recursiveAnchor": lambda *_: True,
}
"""Whether a keyword's value, in this schema, excludes nothing."""


def _add_tag(members: list[Any], document: Any, tags: Tags) -> None:
    """Find a property whose values tell the members of a union apart, as pydantic's and zod's discriminated unions have."""
    targets = [_target(member, document) for member in members]
    if not targets or not all(target.get("type") == "object" for target in targets):
        return
    values = [_tag_values(target) for target in targets]
    for name in values[0]:
        known = [value for one in values for value in one.get(name, ())]
        if all(name in one for one in values) and len(set(known)) == len(known):
            tags.setdefault(id(members), set())
            for target in targets:
                tags.setdefault(id(target), set()).add(name)
            return


def _tag_values(schema: dict[str, Any]) -> dict[str, list[str]]:
    """The texts that properties are bounded to, by the property."""
    found: dict[str, list[str]] = {}
    properties = schema.get("properties")
    for name, one in properties.items() if isinstance(properties, dict) else ():
        values = (
            [one["const"]] if isinstance(one, dict) and "const" in one else isinstance(one, dict) and one.get("enum")
        )
        if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
            found[name] = values
    return found


def _target(member: Any, document: Any) -> dict[str, Any]:
    """A schema, or the one in the document that it refers to; empty if there is none."""
    for _ in range(8):
        if not isinstance(member, dict) or not isinstance(member.get("$ref"), str):
            break
        head, *path = member["$ref"].split("/")
        member = document if head == "#" else None
        for step in path:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            member = member.get(name) if isinstance(member, dict) else None
    return member if isinstance(member, dict) else {}
