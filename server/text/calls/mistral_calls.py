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
        self._arguments: ObjectScanner | None = None
        """Reads the arguments of a call in the newer notation; None outside of them."""

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        self._held += text
        rewritten: list[str] = []
        while self._held and self._rewrite(rewritten):
            pass
        return self._json.push("".join(rewritten))

    def _rewrite(self, rewritten: list[str]) -> bool:
        """Put what is held into the older notation; whether to go on with what is held then."""
        if self._arguments is not None:
            count, _ = self._arguments.push(self._held)
            rewritten.append(self._held[:count])
            self._held = self._held[count:]
            if self._arguments.done:
                rewritten.append("}")
                self._arguments, self._inside = None, False
            return bool(self._held)
        if not self._inside:
            part, mark, self._held = split_at(self._held, (self.START,))
            rewritten.append(part)
            self._inside = mark is not None
            return self._inside
        stripped = self._held.lstrip()
        if stripped and stripped[0] in "[{":
            rewritten.append(self.START)
            self._inside = False
            return True
        named = _MISTRAL_NAMED.match(self._held)
        if named is None:
            return False
        rewritten.append(f'{self.START}{{"name": {json.dumps(named[1])}, "arguments": ')
        self._held = self._held[named.end() :]
        self._arguments = ObjectScanner(of_call=False)
        return True

    def finish(self) -> tuple[str, list[CallDelta]]:
        if self._arguments is not None:
            return self._json.finish()
        text, self._held = (self.START if self._inside else "") + self._held, ""
        content, calls = ("", []) if self._inside else self._json.push(text)
        more, last = self._json.finish()
        return content + (text if self._inside else "") + more, [*calls, *last]
