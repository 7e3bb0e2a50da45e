"""A JSON object read as it is written: its name as soon as it is known, its arguments while they come."""

from __future__ import annotations

import json
from typing import Any

_ARGUMENTS = ("arguments", "parameters")


def is_object(arguments: Any) -> bool:
    """Whether arguments are an object, or one that is written once more as a string."""
    if not isinstance(arguments, str):
        return isinstance(arguments, dict)
    try:
        return isinstance(json.loads(arguments, strict=False), dict)
    except (ValueError, RecursionError):
        return False


class ObjectScanner:
    """Reads one `{"name": ..., "arguments": {...}}`, in any order of keys. "parameters" is another name for arguments.

    Arguments that are not an object (some models write the object once more as a string) come at the end, whole.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.id: str | None = None
        self.raw = ""
        self.done = False
        self.failed = False
        self.takes_object = False
        """Whether there are arguments and they are an object, or one that is written once more as a string."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._at: int | None = None  # where the present string, key or value begins in raw
        self._expects_key = False
        self._value_begun = False
        self._pending = ""
        self._arguments_seen = False

    def push(self, text: str) -> tuple[int, str]:
        """(how many characters were read, arguments that may be sent). Stops where the object ends or is none."""
        added: list[str] = []
        count = 0
        while count < len(text) and not (self.done or self.failed):
            self.raw += text[count]
            self._read(text[count], added)
            count += 1
        self._pending += "".join(added)
        if self.name is None:
            return count, ""
        out, self._pending = self._pending, ""
        return count, out

    def _read(self, character: str, added: list[str]) -> None:
        streaming = self._depth > 1 and self._streams
        if self._in_string:
            self._read_in_string(character)
        else:
            self._read_structure(character, added)
            streaming = streaming or (self._depth > 1 and self._streams)
        if streaming:
            added.append(character)

    def _read_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1 and self._expects_key:
                self._key = self._literal(self.raw[self._at :])
                self._expects_key = False

    def _read_structure(self, character: str, added: list[str]) -> None:
        match character:
            case '"':
                self._in_string = True
                if self._depth == 1 and self._expects_key:
                    self._at = len(self.raw) - 1
                elif self._depth == 1:
                    self._begin_value()
            case "{" | "[":
                if self._depth == 0 and character == "[":
                    self.failed = True
                    return
                if self._depth == 1:
                    self._begin_value(composite=True)
                self._depth += 1
                self._expects_key = self._depth == 1
            case "}" | "]":
                self._depth -= 1
                if self._depth == 0:
                    self._end_value(len(self.raw) - 1, added)
                    self.done = True
            case "," if self._depth == 1:
                self._end_value(len(self.raw) - 1, added)
                self._expects_key = True
            case _ if self._depth == 0:
                self.failed = self.failed or not character.isspace()
            case _ if self._depth == 1 and not character.isspace() and character != ":":
                self._begin_value()

    @property
    def _streams(self) -> bool:
        return self._value_begun and self._composite and self._key in _ARGUMENTS

    def _begin_value(self, *, composite: bool = False) -> None:
        if not self._value_begun:
            self._value_begun, self._composite = True, composite
            self._at = len(self.raw) - 1
            if self._key in _ARGUMENTS:
                self.takes_object = self.raw[-1] == "{"

    def _end_value(self, end: int, added: list[str]) -> None:
        if not self._value_begun:
            if self._depth == 0 and not self._arguments_seen:
                added.append("{}")
            return
        value = self._literal(self.raw[self._at : end])
        match self._key:
            case "name":
                self.name = value if isinstance(value, str) else None
                self.failed = self.name is None
            case "id" if isinstance(value, str):
                self.id = value
            case "arguments" | "parameters":
                self._arguments_seen = True
                if not self._composite:
                    self.takes_object = is_object(value)
                    added.append(value if isinstance(value, str) else "{}" if value is None else json.dumps(value))
        self._value_begun = False
        if self._depth == 0 and not self._arguments_seen:
            added.append("{}")

    _composite = False

    @staticmethod
    def _literal(text: str) -> str | None:
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            return None
        return value  # type: ignore[no-any-return]
