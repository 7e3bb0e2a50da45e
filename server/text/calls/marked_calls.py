"""Tool calls in notations that are no JSON, between two marks: Gemma's and LFM2's."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from server.text.calls.parser import CallDelta, call_id
from server.text.calls.scanner import encodable
from server.text.holdback import split_at

_KEY = re.compile(r"""([{,]\s*)([^\s{},:"\[\]][^{},:"]*?)\s*:""")
"""A key, of any characters that do not divide objects, behind what divides them."""


class MarkedToolParser:
    """Calls in a notation of their own between two marks, read when the second one comes.

    read turns what stands between the marks into (name, arguments as JSON) of each call; none where it is no call.
    """

    def __init__(self, start: str, end: str, read: Callable[[str], Sequence[tuple[str, str]]]) -> None:
        self._start, self._end, self._read = start, end, read
        self._held = ""
        self._inside = False
        self._body: list[str] = []
        self._after_call = False
        self._calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        self._held += text
        content, calls = "", []
        while self._held:
            part, mark, self._held = split_at(self._held, (self._end if self._inside else self._start,))
            if self._inside:
                self._body.append(part)
                if mark is not None:
                    body, self._body = "".join(self._body), []
                    found = self._read(body)
                    if not found:
                        content += self._start + body + self._end
                    for call in found:
                        calls.append(CallDelta(self._calls, call_id(), *call))
                        self._calls += 1
                        self._after_call = True
            else:
                if self._after_call:
                    part = part.lstrip()
                    self._after_call = not part
                content += part
            if mark is None:
                break
            self._inside = not self._inside
        return content, calls

    def finish(self) -> tuple[str, list[CallDelta]]:
        text, self._held = self._held, ""
        return (self._start + "".join(self._body) + text if self._inside else text), []


def read_gemma_call(body: str, quote: str) -> list[tuple[str, str]]:
    """`call:name{key:value,...}` with strings between quote marks, as Gemma's function-calling models write it."""
    named = re.fullmatch(r"\s*call:([A-Za-z0-9_.\-]+)\s*(\{.*\})\s*", body, re.DOTALL)
    if named is None:
        return []
    pieces = named[2].split(quote)
    written = ""
    for i, piece in enumerate(pieces):
        # Outside of strings, keys have no quotes.
        written += json.dumps(piece) if i % 2 else _KEY.sub(lambda key: f"{key[1]}{json.dumps(key[2])}:", piece)
    try:
        return [_call(named[1], json.loads(written))]
    except (ValueError, RecursionError):
        return []


def read_python_calls(body: str) -> list[tuple[str, str]]:
    """`[name(key="value", ...), ...]`, as LFM2 writes calls, or the JSON that its forced calls are."""
    try:
        found = json.loads(body, strict=False)
        return [_call(call["name"], call["arguments"]) for call in found]
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        return [_python_call(call) for call in calls]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return []


def _call(name: Any, arguments: Any) -> tuple[str, str]:
    """A call as MarkedToolParser takes it. Raises ValueError for a name that is no text, and for numbers beyond JSON's."""
    if not isinstance(name, str):
        raise ValueError("a name that is no text")
    return encodable(name), encodable(json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _python_call(call: ast.expr) -> tuple[str, str]:
    """Raises ValueError."""
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call with named arguments")
    arguments = {str(keyword.arg): _python_value(keyword.value) for keyword in call.keywords}
    return _call(ast.unparse(call.func), arguments)


def _python_value(node: ast.expr) -> Any:
    """A literal, of Python or JSON. Raises ValueError."""
    match node:
        case ast.Name("true" | "false" | "null"):
            return {"true": True, "false": False, "null": None}[node.id]
        case ast.List() | ast.Tuple():
            return [_python_value(item) for item in node.elts]
        case ast.Dict():
            keys = [ast.literal_eval(key) if key is not None else "" for key in node.keys]
            return dict(zip(map(str, keys), map(_python_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError("no value of JSON")
    return value
