"""Tool calls that are JSON objects, taken out of an answer's text while it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from server.text.calls.parser import CallDelta, call_id
from server.text.calls.scanner import ObjectScanner, encodable, is_object, written_out
from server.text.holdback import overlap, split_at


class JsonToolParser:
    """Calls as JSON objects: between marks (`<tool_call>{...}</tool_call>`), after one ([TOOL_CALLS], <|python_tag|>), or
    without a mark at an answer's beginning (Llama). Arrays of calls, and separators between them, are taken too.

    Text that turns out to be no call is returned as text. Without a mark an object may be what the user asked for: it is a
    call only if it has the name of a function that there is, and arguments that are an object.
    """

    def __init__(
        self,
        start: str,
        end: str | None,
        *,
        bare: Collection[str] | None = None,
        make_id: Callable[[], str] = call_id,
    ) -> None:
        """bare: names of the functions that may be called without a mark; None where a call needs one."""
        self._start = start
        self._end = end
        self._bare = bare
        self._make_id = make_id
        self._held = ""
        self._inside = self._marked = False
        # What was read since a call's mark, with it, for as long as there is no call; None from then on.
        self._unused: str | None = None
        self._at_beginning = True
        self._scanner: ObjectScanner | None = None
        self._named = False
        self._after_call = False
        self._calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        self._held += text
        content: list[str] = []
        calls: list[CallDelta] = []
        while self._held and (self._read_inside(content, calls) if self._inside else self._read_outside(content)):
            pass
        return "".join(content), calls

    def finish(self) -> tuple[str, list[CallDelta]]:
        text, self._held = self._held, ""
        if not self._inside:
            return text, []
        if self._scanner is not None:
            begun = self._named or self._scanner.name is not None
            return ("" if begun else self._before_object() + self._scanner.raw + text), []
        return ("" if self._unused is None else self._unused + text), []

    def _read_outside(self, content: list[str]) -> bool:
        """Whether to go on with what is held now."""
        if self._bare is not None and self._at_beginning:
            if not self._held.strip():
                return False
            if self._held.lstrip()[0] == "{":
                self._inside, self._marked, self._at_beginning, self._unused = True, False, False, ""
                return True
        text, mark, self._held = split_at(self._held, (self._start,))
        if self._after_call:  # line ends between calls are no content
            text = text.lstrip()
            self._after_call = not text
        content.append(text)
        self._at_beginning = self._at_beginning and not text.strip()
        self._inside, self._marked, self._unused = mark is not None, True, mark
        return self._inside

    def _read_inside(self, content: list[str], calls: list[CallDelta]) -> bool:
        if self._scanner is None:
            self._skip(len(self._held) - len(self._held.lstrip(" \n\r\t,;")))
            for mark, inside in ((self._end, False), (self._start, True)):
                if mark and self._held.startswith(mark):
                    self._skip(len(mark))
                    self._inside = inside
                    if not inside:
                        content.append(self._unused or "")
                    return True
                if mark and overlap(self._held, mark) == len(self._held):
                    return False
            if self._held[0] in "[]":
                self._skip(1)
                return bool(self._held)
            self._scanner, self._named = ObjectScanner(), False
        count, arguments = self._scanner.push(self._held)
        self._held = self._held[count:]
        other = self._is_other(self._scanner, arguments)
        if not other:
            self._report(self._scanner, arguments, calls)
        if other or self._scanner.failed or (self._scanner.done and not self._named and not self._nested(calls)):
            content.append(self._give_up())
        if self._scanner is not None and self._scanner.done:
            self._scanner, self._after_call = None, True
        return bool(self._held)

    def _skip(self, count: int) -> None:
        if self._unused is not None:
            self._unused += self._held[:count]
        self._held = self._held[count:]

    def _before_object(self) -> str:
        """The text that is returned in front of an object that is not a call."""
        if self._unused is None:
            return self._start if self._bare is None else ""
        return self._unused

    def _report(self, scanner: ObjectScanner, arguments: str, calls: list[CallDelta]) -> None:
        if self._named:
            if arguments:
                calls.append(CallDelta(self._calls - 1, None, None, arguments))
        elif scanner.name is not None and arguments:
            # A call is not passed on before its arguments begin; one that is cut off earlier would seem to have none.
            self._named, self._unused = True, None
            calls.append(CallDelta(self._calls, self._make_id(), scanner.name, arguments))
            self._calls += 1

    def _is_other(self, scanner: ObjectScanner, arguments: str) -> bool:
        """Whether an object without a mark has turned out to be none of the functions' calls."""
        if self._bare is None or self._marked or self._named or scanner.name is None:
            return False
        return scanner.name not in self._bare or bool(arguments and not scanner.takes_object)

    def _nested(self, calls: list[CallDelta]) -> bool:
        """OpenAI's own form: {"type": "function", "function": {...}}."""
        assert self._scanner is not None
        try:
            inner = json.loads(self._scanner.raw, strict=False).get("function")
        except (ValueError, RecursionError):
            return False
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            return False
        arguments = inner.get("arguments", inner.get("parameters"))
        if self._bare is not None and not self._marked and not (inner["name"] in self._bare and is_object(arguments)):
            return False
        calls.append(CallDelta(self._calls, self._make_id(), encodable(inner["name"]), written_out(arguments)))
        self._calls += 1
        self._unused = None
        return True

    def _give_up(self) -> str:
        assert self._scanner is not None
        given_back = "" if self._named else self._before_object() + self._scanner.raw
        self._scanner, self._inside, self._at_beginning = None, False, False
        self._after_call = self._after_call and not given_back
        return given_back
