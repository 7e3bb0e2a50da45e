"""Tool calls in Mistral's two notations."""

from __future__ import annotations

import json
import re

from server.text.calls.json_calls import JsonToolParser
from server.text.calls.parser import CallDelta, short_call_id
from server.text.calls.scanner import ObjectScanner
from server.text.holdback import split_at

_MISTRAL_NAMED = re.compile(r"\s*([A-Za-z0-9_.\-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)")


class MistralToolParser:
    """Mistral's two notations: `[TOOL_CALLS][{"name": ..., "arguments": ...}]` and `[TOOL_CALLS]name[ARGS]{...}`."""

    START = "[TOOL_CALLS]"

    def __init__(self) -> None:
        self._json = JsonToolParser(self.START, None, make_id=short_call_id)
        self._held = ""
        self._inside = False

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """See ToolParser.push."""
        self._held += text
        rewritten = ""
        while self._held:
            if not self._inside:
                part, mark, self._held = split_at(self._held, (self.START,))
                # The newer notation becomes the older one, whose object ends where the arguments do.
                rewritten += part
                if mark is None:
                    break
                self._inside = True
            stripped = self._held.lstrip()
            if not stripped:
                break
            if stripped[0] in "[{":
                rewritten += self.START
                self._inside = False
                continue
            named = _MISTRAL_NAMED.match(self._held)
            if named is None:
                break
            rewritten += f'{self.START}{{"name": {json.dumps(named[1])}, "arguments": '
            self._held = self._held[named.end() :]
            end = _balanced(self._held)
            if end is None:
                # Complete calls only: what closes the object has to follow the arguments.
                self._held = named[0] + self._held
                rewritten = rewritten[: rewritten.rindex(self.START)]
                break
            rewritten += self._held[:end] + "}"
            self._held = self._held[end:]
            self._inside = False
        return self._json.push(rewritten)

    def finish(self) -> tuple[str, list[CallDelta]]:
        """See ToolParser.push."""
        text, self._held = (self.START if self._inside else "") + self._held, ""
        content, calls = ("", []) if self._inside else self._json.push(text)
        more, last = self._json.finish()
        return content + (text if self._inside else "") + more, [*calls, *last]


def _balanced(text: str) -> int | None:
    """Where the JSON object that text begins with ends; None while it is open."""
    scanner = ObjectScanner()
    count, _ = scanner.push(text)
    return count if scanner.done else None
