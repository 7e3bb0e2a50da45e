"""Schemas with keywords that exclude nothing are taken, and what a mended schema allows the schema itself allows, too."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from server.text.dialect import Dialect
from server.text.grammars.grammar import json_grammar, tools_grammar
from server.text.grammars.schemas import KNOWN_FORMATS
from tests.text.texts import takes


def tagged(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind, "default": kind}, kind: {"type": "integer"}},
            "required": [kind]} | more  # fmt: skip


UNION = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/b~1"}], "discriminator": {"propertyName": "kind"},
         "$defs": {"A": tagged("a"), "b/": tagged("b")}}  # fmt: skip
TAKEN: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "format path": ({"type": "string", "format": "path"}, ["/x", ""], [1]),
    "format uri-reference": ({"type": "string", "format": "uri-reference"}, ["../x"], []),
    "format date": ({"type": "string", "format": "date"}, ["2026-01-31"], ["x"]),
    "record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        [{"a": 1.5}],
        [{"a": "b"}],
    ),
    "any names": ({"type": "object", "propertyNames": {"description": "a name"}}, [{"a": 1}], []),
    "not nothing": ({"anyOf": [{"not": {}}, {"type": "string"}]}, ["a"], [1]),
    "no never": (
        {"type": "object", "properties": {"a": {"not": {}}, "b": {"not": {"not": {}}}}},
        [{"b": 1}],
        [{"a": 1}],
    ),
    "unlike": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [[1, 1]], [["a"]]),
    "one unlike": ({"type": "array", "maxItems": 1, "uniqueItems": True}, [[1], []], [[1, 2]]),
    "int64": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [0, -(2**63) + 1024, 2**63 - 1],
        [2**63, 1.5],
    ),
    "above -int64": ({"type": "integer", "exclusiveMinimum": -(2**63)}, [0, -(2**62), 10**30], [-(10**30)]),
    "uint64": ({"type": ["integer", "null"], "minimum": 0, "maximum": 2**64 - 1}, [0, 2**63 - 1, None], [-1, 2**64]),
    "float64": (
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        [0, -1.5, 1e300],
        [],
    ),
    "float32": ({"type": "number", "minimum": 0, "exclusiveMaximum": 3.5e38}, [0, 1.5, 10**18], [-1, 10**40]),
    "tagged union": (
        {"oneOf": [tagged("a"), tagged("b")]},
        [{"kind": "a", "a": 1}, {"kind": "b", "b": 2}],
        [{"kind": "a", "b": 1}],
    ),
    "a union of references": (UNION, [{"kind": "a", "a": 1}, {"kind": "b", "b": 2}], [{"kind": "b", "a": 1}]),
    "a union within": (
        {
            "$id": "https://example.com/x",
            "type": "object",
            "properties": {
                "u": {"type": "array", "items": {key: value for key, value in UNION.items() if key != "$defs"}}
            },
            "$defs": UNION["$defs"],
        },
        [{"u": [{"kind": "b", "b": 1}, {"kind": "a", "a": 2}]}],
        [{"u": [{"kind": "c"}]}],
    ),
    "a tag of several texts": (
        {"oneOf": [tagged("a") | {"properties": {"kind": {"enum": ["a", "c"]}, "a": {}}}, tagged("b")]},
        [{"kind": "c", "a": 1}, {"kind": "b", "b": 2}],
        [{"kind": "c"}],
    ),
    "open": (
        {"type": "object", "unevaluatedProperties": True, "dependentRequired": {}, "dependencies": {"a": []}},
        [{"a": 1}],
        [1],
    ),
    "if nothing": ({"type": "integer", "if": {"minimum": 3}, "then": True}, [1, 4], ["a"]),
    "then alone": ({"type": "integer", "then": False}, [1], ["a"]),
    "some or none": ({"type": "array", "contains": {"const": 1}, "minContains": 0}, [[], [2]], [1]),
    "a dynamic anchor": ({"$ref": "#it", "$defs": {"I": {"$dynamicAnchor": "it", "type": "integer"}}}, [1], ["a"]),
    "properties called as keywords are": (
        {
            "type": "object",
            "properties": {
                "format": {"type": "string", "format": "path"},
                "not": {},
                "const": {"pattern": "^[^b]$"},
                "if": {"type": "integer"},
            },
        },
        [{"format": "a"}, {"not": 1}, {"const": "a"}, {"if": 1}],
        [{"if": "a"}, {"format": 1}],
    ),
}
EXCLUDES: dict[str, Any] = {
    "unlike": {"type": "array", "uniqueItems": True},
    "names": {"type": "object", "propertyNames": {"maxLength": 3}},
    "not": {"type": "string", "not": {"const": "a"}},
    "if": {"if": {"const": 1}, "then": False},
    "no tag": {"oneOf": [tagged("a"), tagged("a")]},
    "a tag of anything": {"oneOf": [tagged("a"), {"type": "object"}]},
    "a tag of no object": {"oneOf": [tagged("a"), {"properties": {"kind": {"const": "b"}}}]},
    "beyond numbers": {"type": "number", "minimum": 1e30},
    "needs": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "required that is none": {"oneOf": [tagged("a") | {"required": 5}, tagged("b")], "uniqueItems": True},
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_excludes_nothing_refuses_nothing(tokenizer: LLTokenizer, name: str) -> None:
    schema, yes, no = TAKEN[name]
    before = json.dumps(schema)
    grammar = json_grammar(schema)
    assert json.dumps(schema) == before
    validator = jsonschema.Draft202012Validator(schema)
    for value in yes:
        assert takes(tokenizer, grammar, json.dumps(value)), value
        assert validator.is_valid(value)
    for value in no:
        assert not takes(tokenizer, grammar, json.dumps(value)), value
    function = {
        "function": {"name": "f", "parameters": {"properties": {"x": schema}, "$defs": schema.get("$defs", {})}}
    }
    if "$ref" not in json.dumps(schema):
        calls = tools_grammar(Dialect("llama", None, None), [function], lambda _: None, several=False)
        assert takes(tokenizer, calls, json.dumps({"name": "f", "parameters": {"x": yes[0]}}))


@pytest.mark.parametrize("name", EXCLUDES)
def test_what_excludes_something_and_cannot_be_expressed_is_refused(tokenizer: LLTokenizer, name: str) -> None:
    with pytest.raises(ValueError, match="failed to compile JSON schema"):
        takes(tokenizer, json_grammar(EXCLUDES[name]), "1")


def test_known_formats_are_those_of_llguidance(tokenizer: LLTokenizer) -> None:
    for name in [*KNOWN_FORMATS, "iri", "regex", "path", "int64", "idn-email", "json-pointer", "uri-template"]:
        schema = {"x-guidance": {}, "type": "string", "format": name}
        grammar = json.dumps({"grammars": [{"lark_grammar": f"start: %json {json.dumps(schema)}"}]})
        assert LLMatcher(tokenizer, grammar, log_level=0).is_error() == (name not in KNOWN_FORMATS), name
