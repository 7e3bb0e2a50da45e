"""Functions' parameters get no arguments beyond those they name."""

from __future__ import annotations

from typing import Any

import pytest

from server.text.grammars.closing import close_objects

INNER = {"properties": {"a": {"type": "integer"}}}
CLOSED = INNER | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (INNER, CLOSED),
        ({}, {}),
        ({"type": "object"}, {"type": "object"}),
        (INNER | {"additionalProperties": {"type": "null"}}, INNER | {"additionalProperties": {"type": "null"}}),
        ({"properties": {"x": INNER, "properties": INNER}},
         {"properties": {"x": CLOSED, "properties": CLOSED}, "additionalProperties": False}),
        ({"properties": {"x": {"items": INNER}}}, {"properties": {"x": {"items": CLOSED}}, "additionalProperties": False}),
        ({"anyOf": [INNER, True]}, {"anyOf": [CLOSED, True]}),
        (INNER | {"anyOf": [INNER]}, INNER | {"anyOf": [INNER]}),
        ({"$defs": {"d": INNER}, "$ref": "#/$defs/d"}, {"$defs": {"d": CLOSED}, "$ref": "#/$defs/d"}),
        ({"$defs": {"d": INNER}, "allOf": [{"$ref": "#/$defs/d"}, INNER]},
         {"$defs": {"d": INNER}, "allOf": [{"$ref": "#/$defs/d"}, INNER]}),
        (INNER | {"$ref": "#/$defs/d", "$defs": {"d": INNER}}, INNER | {"$ref": "#/$defs/d", "$defs": {"d": INNER}}),
    ],
)  # fmt: skip
def test_close_objects(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert close_objects(schema) == expected
