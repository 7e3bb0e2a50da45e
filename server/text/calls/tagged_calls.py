"""Tool calls whose arguments stand between tags, one by one: Qwen3-Coder's and Qwen3.5's, Seed-OSS', MiniMax' and GLM's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from server.text.calls.json_calls import JsonToolParser
from server.text.calls.parser import CallDelta
from server.text.holdback import split_at

_LONGEST_NAME = 256
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_TYPES: dict[type, str] = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}


@dataclass(frozen=True)
class Tags:
    """A notation: marks around calls, patterns of what begins a call and an argument, texts that end them."""

    start: str
    end: str
    name: re.Pattern[str]
    key: re.Pattern[str]
    value_end: str
    call_end: str
    opening: str
    """The beginning of what name matches, if more than one call may stand between the marks."""
    lines: bool
    """Whether a line end on either side of a value is no part of it."""
    unmarked: bool = False
    """Whether calls of functions that there are count without a mark, which some models leave out."""


XML = Tags(
    "<tool_call>", "</tool_call>", re.compile(r"\s*<function=([^<>\s]+)>"), re.compile(r"<parameter=([^<>\n]+)>"),
    "</parameter>", "</function>", "<function=", lines=True, unmarked=True,
)  # fmt: skip
GLM = Tags(
    "<tool_call>", "</tool_call>", re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*(?=<)"),
    re.compile(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>"), "</arg_value>", "</tool_call>", "", lines=False,
)  # fmt: skip


SEED = replace(XML, start="<seed:tool_call>", end="</seed:tool_call>", lines=False)
MINIMAX = Tags(
    "<minimax:tool_call>", "</minimax:tool_call>", re.compile(r"\s*<invoke name=\"([^<>\"]+)\">"),
    re.compile(r"<parameter name=\"([^<>\"]+)\">"), "</parameter>", "</invoke>", "<invoke name=", lines=False,
)  # fmt: skip


class TaggedToolParser:
    """Reads calls in tags, and JSON between the same marks, which forced calls are. Texts of arguments stream.

    A call is rewritten as JSON, which JsonToolParser reads.
    """

    def __init__(self, tags: Tags, functions: Mapping[str, Any]) -> None:
        """functions: parameters' schemas by the functions' names; they say which values are texts."""
        self._tags = tags
        self._functions = functions
        self._json = JsonToolParser(tags.start, tags.end)
        self._starts = (tags.start, tags.opening) if tags.unmarked else (tags.start,)
        self._mark = ""
        """The mark in front of the present call; empty for one without."""
        self._held = ""
        self._state: Literal["outside", "name", "key", "value", "after"] = "outside"
        self._schemas: Mapping[str, Any] = {}
        self._schema: Any = None
        self._is_first = True
        self._value: list[str] | None = None
        """The present value's pieces, if it is read when it is complete."""
        self._at_value = False

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        self._held += text
        rewritten: list[str] = []
        while self._held and getattr(self, f"_read_{self._state}")(rewritten):
            pass
        return self._json.push("".join(rewritten))

    def finish(self) -> tuple[str, list[CallDelta]]:
        text, self._held = self._held, ""
        match self._state:
            case "name":
                text = self._mark + text
            case "value" if self._value is None:
                text = _escaped(text)
            case "key" | "value" | "after":
                text = ""
        content, calls = self._json.push(text)
        more, last = self._json.finish()
        return content + more, [*calls, *last]

    def _read_outside(self, rewritten: list[str]) -> bool:
        """Whether to go on with what is held now, as the other methods of this kind."""
        text, mark, self._held = split_at(self._held, self._starts)
        rewritten.append(text)
        if mark is None:
            return False
        self._state, self._mark = "name", mark if mark == self._tags.start else ""
        if not self._mark:
            self._held = mark + self._held
        return True

    def _read_name(self, rewritten: list[str]) -> bool:
        named = self._tags.name.match(self._held)
        if named is not None and not self._mark and named[1] not in self._functions:
            rewritten.append(named[0])
            self._held, self._state = self._held[named.end() :], "outside"
            return True
        if named is not None:
            rewritten.append(f'{self._tags.start}{{"name": {json.dumps(named[1])}, "arguments": {{')
            parameters = self._functions.get(named[1])
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            self._schemas = properties if isinstance(properties, dict) else {}
            self._held, self._state, self._is_first = self._held[named.end() :], "key", True
            return True
        stripped = self._held.lstrip()
        other = stripped[:1] in ("{", "[") or self._tags.end in self._held or len(stripped) > _LONGEST_NAME
        if other:  # JSON, or no call
            begun = self._mark or self._tags.opening
            rewritten.append(begun)
            self._held, self._state = self._held if self._mark else self._held[len(begun) :], "outside"
        return other

    def _read_key(self, rewritten: list[str]) -> bool:
        _, end, rest = split_at(self._held, {self._tags.call_end, self._tags.end})
        key = self._tags.key.search(self._held)
        if key is not None and (end is None or key.end() <= len(self._held) - len(rest)):
            self._schema = self._schemas.get(key[1])
            is_text = _types(self._schema) == {"string"}
            rewritten.append(("" if self._is_first else ", ") + json.dumps(key[1]) + (': "' if is_text else ": "))
            self._value = None if is_text else []
            self._held, self._state, self._is_first, self._at_value = self._held[key.end() :], "value", False, True
            return True
        if end is None:
            return False
        rewritten.append(f"}}}}{self._tags.end}")
        self._held, self._state = rest, "outside" if end == self._tags.end else "after"
        return True

    def _read_value(self, rewritten: list[str]) -> bool:
        if self._at_value and self._tags.lines:
            self._held = self._held.removeprefix("\n")
        self._at_value = False
        ends = (f"\n{self._tags.value_end}", self._tags.value_end) if self._tags.lines else (self._tags.value_end,)
        text, end, self._held = split_at(self._held, ends)
        if self._value is None:
            rewritten.append(_escaped(text))
        else:
            self._value.append(text)
        if end is None:
            return False
        rewritten.append('"' if self._value is None else _written("".join(self._value), self._schema))
        self._state = "key"
        return True

    def _read_after(self, _: list[str]) -> bool:
        """Behind a call: the mark of its end, or one more call between the same marks."""
        stripped = self._held.lstrip()
        more = self._tags.name.match(self._held)
        opened = more is None and stripped.startswith(self._tags.opening) and len(stripped) < _LONGEST_NAME
        if opened or any(
            mark != stripped and mark.startswith(stripped) for mark in (self._tags.end, self._tags.opening)
        ):
            return False
        if stripped.startswith(self._tags.end):
            self._held = stripped[len(self._tags.end) :]
        self._state, self._mark = "outside" if more is None else "name", self._tags.start
        return bool(self._held)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _written(text: str, schema: Any) -> str:
    """A value as JSON: what it says, unless the schema wants a text there."""
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    types = _types(schema)
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = "string" not in types or _TYPES.get(type(value), "number") in {*types} - {"string"}
    if "integer" in types and isinstance(value, int):
        fits = True
    return bare if fits else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _types(schema: Any) -> set[str]:
    """Types of JSON that a schema allows, as far as it says so itself."""
    return set(_named_types(schema))


def _named_types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, dict):
        return
    named = schema.get("type")
    if named is not None:
        yield from (named if isinstance(named, list) else [named])
        return
    for value in [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else ())]:
        yield _TYPES.get(type(value), "number")
    for union in ("anyOf", "oneOf", "allOf"):
        for member in schema.get(union) or ():
            yield from _named_types(member)
