"""A JSON object read as it is written: its name as soon as it is known, its arguments while they come."""

from __future__ import annotations

import json
import re
from typing import Any

_ARGUMENTS = ("arguments", "parameters")

# What changes nothing about the state: within a string, and within an object or array of the object's own.
_PLAIN_IN_STRING = re.compile(r'[^"\\]+')
_PLAIN_IN_VALUE = re.compile(r'[^"{}\[\]]+')


def is_object(arguments: Any) -> bool:
    """Whether arguments are an object, or one that is written once more as a string."""
    if not isinstance(arguments, str):
        return isinstance(arguments, dict)
    try:
        return isinstance(json.loads(arguments, strict=False), dict)
    except (ValueError, RecursionError):
        return False


def encodable(text: str) -> str:
    """A decoded text with escapes in the place of halves of surrogate pairs, which UTF-8 does not have."""
    return text.encode("utf-8", "backslashreplace").decode()


def written_out(arguments: Any) -> str:
    """Arguments as JSON, whether they are that already or not; models say in many ways that there are none."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return "{}" if text.strip() in ("", "null") else encodable(text)


class ObjectScanner:
    """Reads one `{"name": ..., "arguments": {...}}`, in any order of keys. Other names are "parameters" and "tool_name".

    Arguments that are not an object (some models write the object once more as a string) come at the end, whole. The time it
    takes grows with the text's length, however the text is cut.
    """

    def __init__(self, *, of_call: bool = True) -> None:
        """of_call: whether the object says what is called; of another one only the end is found."""
        self._of_call = of_call
        self.name: str | None = None
        self.id: str | None = None
        self.done = False
        self.failed = False
        self.takes_object = False
        """Whether there are arguments and they are an object, or one that is written once more as a string."""
        self._read: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._expects_key = False
        self._value_begun = False
        self._composite = False
        self._literal: list[str] | None = None
        """The present key, or the present value if that is neither an object nor an array."""
        self._pending: list[str] = []
        self._arguments_seen = False

    @property
    def raw(self) -> str:
        """All that was read."""
        return "".join(self._read)

    def push(self, text: str) -> tuple[int, str]:
        """(how many characters were read, arguments that may be sent). Stops where the object ends or is none."""
        count = 0
        while count < len(text) and not (self.done or self.failed):
            end = self._end_of_run(text, count)
            run, count = text[count:end], end
            self._read.append(run)
            streaming = self._streams
            if self._in_string:
                self._read_in_string(run)
            else:
                self._read_structure(run)
            if streaming or self._streams:
                self._pending.append(run)
        if self.name is None:
            return count, ""
        out, self._pending = "".join(self._pending), []
        return count, out

    def _end_of_run(self, text: str, start: int) -> int:
        """End of the characters that are read together: those that change no state, or one that may."""
        if self._escaped or (self._depth < 2 and not self._in_string):
            return start + 1
        plain = (_PLAIN_IN_STRING if self._in_string else _PLAIN_IN_VALUE).match(text, start)
        return plain.end() if plain else start + 1

    def _read_in_string(self, run: str) -> None:
        if self._literal is not None:
            self._literal.append(run)
        if self._escaped:
            self._escaped = False
        elif run == "\\":
            self._escaped = True
        elif run == '"':
            self._in_string = False
            if self._depth == 1 and self._expects_key:
                self._key, self._expects_key = self._taken_literal(), False

    def _read_structure(self, run: str) -> None:
        match run:
            case '"':
                self._in_string = True
                if self._depth == 1 and self._expects_key:
                    self._literal = []
                elif self._depth == 1:
                    self._begin_value(run)
            case "{" | "[":
                if self._depth == 0 and run == "[":
                    self.failed = True
                    return
                if self._depth == 1:
                    self._begin_value(run)
                self._depth += 1
                self._expects_key = self._depth == 1
            case "}" | "]":
                self._depth -= 1
                if self._depth == 0:
                    self._end_value()
                    self.done = True
            case "," if self._depth == 1:
                self._end_value()
                self._expects_key = True
            case _ if self._depth == 0:
                self.failed = self.failed or not run.isspace()
            case _ if self._depth == 1 and not run.isspace() and run != ":":
                self._begin_value(run)
        if self._literal is not None:
            self._literal.append(run)

    @property
    def _streams(self) -> bool:
        return self._of_call and self._depth > 1 and self._value_begun and self._composite and self._key in _ARGUMENTS

    def _begin_value(self, first: str) -> None:
        if self._value_begun:
            return
        self._value_begun, self._composite = True, first in "{["
        self._literal = None if self._composite else []
        if self._key in _ARGUMENTS:
            self.takes_object = first == "{"

    def _end_value(self) -> None:
        if self._value_begun:
            value = self._taken_literal()
            match self._key if self._of_call else None:
                case "name" | "tool_name":
                    self.name = encodable(value) if isinstance(value, str) else None
                    self.failed = self.name is None
                case "id" if isinstance(value, str):
                    self.id = value
                case "arguments" | "parameters":
                    self._arguments_seen = True
                    if not self._composite:
                        self.takes_object = is_object(value)
                        self._pending.append(written_out(value))
        self._value_begun = False
        if self._depth == 0 and self._of_call and not self._arguments_seen:
            self._pending.append("{}")

    def _taken_literal(self) -> Any:
        """The value of the literal that ends here; None for one that is no JSON, and for an object or array."""
        text, self._literal = "".join(self._literal or ()), None
        try:
            return json.loads(text, strict=False)
        except ValueError:
            return None
