"""Tool calls in notations that are no JSON, each between two marks: Gemma's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from server.text.calls.parser import CallDelta, call_id
from server.text.holdback import split_at

_KEY = re.compile(r"""([{,]\s*)([^\s{},:"\[\]][^{},:"]*?)\s*:""")
"""A key, of any characters that do not divide objects, behind what divides them."""


class MarkedToolParser:
    """Calls in a notation of their own, each between two marks, read when it is complete.

    read turns what stands between the marks into (name, arguments as JSON), or None where it is no call.
    """

    def __init__(self, start: str, end: str, read: Callable[[str], tuple[str, str] | None]) -> None:
        self._start, self._end, self._read = start, end, read
        self._held = ""
        self._inside = False
        self._body: list[str] = []
        self._after_call = False
        self._calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """See ToolParser.push."""
        self._held += text
        content, calls = "", []
        while self._held:
            part, mark, self._held = split_at(self._held, (self._end if self._inside else self._start,))
            if self._inside:
                self._body.append(part)
                if mark is not None:
                    body, self._body = "".join(self._body), []
                    call = self._read(body)
                    if call is None:
                        content += self._start + body + self._end
                    else:
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
        """See ToolParser.push."""
        text, self._held = self._held, ""
        return (self._start + "".join(self._body) + text if self._inside else text), []


def read_gemma_call(body: str, quote: str) -> tuple[str, str] | None:
    """`call:name{key:value,...}` with strings between quote marks, as Gemma's function-calling models write it."""
    named = re.fullmatch(r"\s*call:([A-Za-z0-9_.\-]+)\s*(\{.*\})\s*", body, re.DOTALL)
    if named is None:
        return None
    pieces = named[2].split(quote)
    written = ""
    for i, piece in enumerate(pieces):
        # Outside of strings, keys have no quotes.
        written += json.dumps(piece) if i % 2 else _KEY.sub(lambda key: f"{key[1]}{json.dumps(key[2])}:", piece)
    try:
        arguments = json.loads(written)
    except ValueError:
        return None
    return named[1], json.dumps(arguments, ensure_ascii=False)
