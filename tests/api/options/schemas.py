"""JSON schemas as applications write them: what models are asked to fill in, call and extract."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
INT, NUM, BOOL, NULL = ({"type": name} for name in ("integer", "number", "boolean", "null"))


def obj(_optional: Schema | None = None, /, **properties: Any) -> Schema:
    """A closed object: the keyword arguments are required."""
    every = properties | (_optional or {})
    return {"type": "object", "properties": every, "required": list(properties), "additionalProperties": False}


def arr(items: Any, least: int = 0, most: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


def text(most: int = 12, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def like(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def enum(*values: Any) -> Schema:
    return {"enum": list(values)}


def between(least: float, most: float, kind: str = "integer") -> Schema:
    return {"type": kind, "minimum": least, "maximum": most}


def either(*options: Schema) -> Schema:
    return {"anyOf": list(options)}


def ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


POINT = obj(lat=between(-90, 90), lon=between(-180, 180))
DATE = {"type": "string", "format": "date"}

FLAT = {
    "count": obj(n=between(-5, 1200)),
    "flags": obj({"x": NUM}, ok=BOOL, no=NULL),
    "exclusive": obj(n={"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100}),
    "multiple": obj(step={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}),
    "lengths": obj(s={"type": "string", "minLength": 2, "maxLength": 4}),
    "empty string": obj(s={"type": "string", "maxLength": 0}),
    "nothing": obj(),
    "nullable": obj(v={"type": ["integer", "null"]}),
    "constant object": obj(a={"const": {"b": [1, "c"]}}),
    "all of": obj(e={"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}),
    "values": {"type": "object", "additionalProperties": between(0, 9), "maxProperties": 2},
}
ENUMS = {
    "label": enum("spam", "ham"),
    "mixed": obj(v=enum(None, True, 0, "zero", 1.5)),
    "prefixes": obj(v=enum("a", "ab", "abc", "b")),
    "quotes": obj(v=enum('say "hi"', "it's", "back\\slash", "line\nbreak", "tab\t")),
    "long": obj(country=enum(*(f"country-{i:03}" for i in range(200)))),
    "objects": obj(v=enum({"a": 1}, {"a": 2, "b": []})),
}
ARRAYS = {
    "integers": obj(v=arr(between(0, 99), 1)),
    "empty": obj(v=arr(INT, 0, 0)),
    "exact": obj(v=arr(between(0, 255), 3, 3)),
    "deep": obj(m=arr(arr(arr(BOOL, 1, 1), 1, 1), 1, 2)),
    "tuple and more": obj(
        t={"type": "array", "prefixItems": [BOOL], "items": between(0, 9), "minItems": 1, "maxItems": 3}
    ),
    "of choices": obj(v=arr(either(between(0, 9), enum("none")), 1, 3)),
    "of tuples": obj(v=arr({"type": "array", "prefixItems": [text(4), BOOL], "items": False, "minItems": 2}, 1, 2)),
}
NESTED = {
    "five": obj(a=obj(b=obj(c=obj(d=obj(e=between(0, 9)))))),
    "siblings": obj(a=obj(x=INT), b=obj(x=BOOL), c=obj(x=NULL)),
    "optional inside": obj(a=obj({"x": BOOL, "y": NULL})),
    "event": obj(title=text(), date=DATE, guests=arr(text(8), 0, 2)),
    "order": obj(id=between(1, 999), lines=arr(obj(sku=like(r"^[A-Z]{2}\d{3}$"), n=between(1, 9)), 1, 2)),
    "map of objects": {"type": "object", "additionalProperties": obj(n=between(0, 9)), "maxProperties": 1},
}
CHOICES = {
    "objects": obj(shape=either(obj(r=between(1, 9)), obj(w=between(1, 9), h=between(1, 9)))),
    "tagged": obj(
        event=either(
            obj(kind={"const": "click"}, x=between(0, 99)), obj(kind={"const": "key"}, code=enum("up", "down"))
        )
    ),
    "one of": obj(v={"oneOf": [{"type": "boolean"}, {"type": "null"}]}),
    "nested": obj(v=either(either(BOOL, NULL), arr(BOOL, 1, 1))),
    "optional": obj({"next": either(text(6), NULL)}, id=between(0, 9)),
    "same start": obj(v=either(obj(a=BOOL), obj(a=BOOL, b=BOOL), obj(a=BOOL, c=NULL))),
    "all and any": obj(v={"allOf": [either(between(0, 5), NULL)]}),
}
PATTERNS = {
    "hex": obj(u=like(r"^[a-f]{3}-\d{2}$")),
    "email": obj(email=like(r"^[a-z]{1,6}@[a-z]{1,6}\.(com|org)$")),
    "version": obj(version=like(r"^\d{1,2}\.\d{1,2}\.\d{1,2}(-rc\d)?$")),
    "words": obj(s=like(r"^\w{1,5}( \w{1,5}){0,2}$")),
    "alternation": obj(s=like("^(yes|no|maybe so)$")),
    "unanchored": obj(s=like(r"\d\d") | {"maxLength": 8}),
    "escapes": obj(s=like(r'^"[^"\\]{1,4}"$')),
    "time": obj(t={"type": "string", "format": "date-time"}),
    "uuid": obj(id={"type": "string", "format": "uuid"}),
    "key pattern": {"type": "object", "patternProperties": {"^k[0-9]$": BOOL}, "additionalProperties": False},
}
NODE = obj(v=enum(1, 2), next=either(ref("node"), NULL))
RECURSIVE = {
    "list": obj(head=ref("node")) | {"$defs": {"node": NODE}},
    "expression": ref("e") | {"$defs": {"e": either(between(0, 9), obj(op=enum("+", "*"), a=ref("e"), b=ref("e")))}},
    "mutual": ref("a") | {"$defs": {"a": obj({"b": ref("b")}, x=BOOL), "b": obj({"a": ref("a")}, y=NULL)}},
    "json": ref("j") | {"$defs": {"j": either(BOOL, NULL, between(0, 9), arr(ref("j"), 0, 2))}},
    "shared": obj(a=ref("p"), b=ref("p")) | {"$defs": {"p": POINT}},
    "definitions": {
        "type": "object",
        "properties": {"x": {"$ref": "#/definitions/small"}},
        "required": ["x"],
        "additionalProperties": False,
        "definitions": {"small": between(0, 9)},
    },
    "chain": obj(v=ref("a")) | {"$defs": {"a": ref("b"), "b": ref("c"), "c": BOOL}},
}
UNICODE = {
    "keys": obj(**{"色": enum("赤", "青")}),
    "emoji": obj(mood=enum("😀", "😢", "👩‍👩‍👧")),
    "accents": obj(**{"prénom": text(8), "größe": between(1, 9)}),
    "pattern": obj(s=like("^[ぁ-ん]{1,4}$")),
    "astral": obj(s=enum("𝄞", "𐍈")),
    "escapes in keys": obj(**{'a"b': BOOL, "c\\d": NULL, "e f": BOOL}),
    "keywords as keys": obj(**{"type": BOOL, "$ref": NULL, "properties": enum("items")}),
}
ALL = {
    f"{kind}: {name}": schema
    for kind, schemas in {
        "flat": FLAT,
        "enum": ENUMS,
        "array": ARRAYS,
        "nested": NESTED,
        "choice": CHOICES,
        "pattern": PATTERNS,
        "recursive": RECURSIVE,
        "unicode": UNICODE,
    }.items()
    for name, schema in schemas.items()
}
