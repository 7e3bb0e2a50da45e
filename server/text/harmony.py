"""Answers in OpenAI's harmony format (gpt-oss): messages on channels, of which thoughts, texts and calls are made."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from server.text.calls.scanner import ObjectScanner
from server.text.holdback import split_at

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALLED, _RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, _END, _CALLED, _RETURN)
CALL = "\U000ffff2"
"""Private-use character in front of a call's JSON in what a splitter gives; no model writes it."""

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_BEGINNINGS = (CHANNEL, START, "to=", "assistant")


class HarmonySplitter:
    """Splits one answer as ReasoningSplitter does; calls are JSON after the mark CALL in the answer.

    The channel final is the answer, and so is commentary to nobody, which agents show. Anything else is thoughts.
    """

    def __init__(self, prompt: str, functions: Collection[str]) -> None:
        """prompt: its end may have begun a message."""
        header, mark, _ = prompt.rpartition(START)[2].partition(MESSAGE)
        self._functions = functions
        self._header = mark == ""
        """Whether a message's header comes; else its body."""
        self._shown = mark != "" and self._is_shown(header)
        self._arguments: ObjectScanner | None = None
        self._held = ""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is no part of the answer."""
        return not self._shown and self._arguments is None

    def push(self, text: str) -> tuple[str, str]:
        """(thoughts, answer) that this text completes."""
        self._held += text
        thoughts: list[str] = []
        answer: list[str] = []
        while self._held and (self._read_header(answer) if self._header else self._read_body(thoughts, answer)):
            pass
        return "".join(thoughts), "".join(answer)

    def finish(self) -> tuple[str, str]:
        """Give what was held back, at the end of the text."""
        text, self._held = self._held, ""
        if self._header or self._arguments is not None:
            return "", ""
        return ("", text) if self._shown else (text, "")

    def _read_header(self, answer: list[str]) -> bool:
        """Whether to go on with what is held now."""
        header, mark, rest = split_at(self._held, (MESSAGE,))
        stripped = self._held.lstrip()
        if not any(stripped.startswith(begin) or begin.startswith(stripped) for begin in _BEGINNINGS):
            self._header, self._shown = False, True  # a model that leaves the header out
            return True
        if mark is None:
            return False
        self._held, self._header = rest, False
        name = self._called(header)
        self._shown = name is None and self._is_shown(header)
        self._arguments = ObjectScanner(of_call=False) if name is not None else None
        if name is not None:
            answer.append(f'{CALL}{{"name": {json.dumps(name)}, "arguments": ')
        return True

    def _read_body(self, thoughts: list[str], answer: list[str]) -> bool:
        text, mark, self._held = split_at(self._held, (_END, _CALLED, _RETURN, START, CHANNEL))
        if self._arguments is not None:
            self._read_arguments(text, answer, ended=mark is not None)
        else:
            (answer if self._shown else thoughts).append(text)
        if mark is None:
            return False
        self._header, self._shown, self._arguments = True, False, None
        if mark == CHANNEL:
            self._held = mark + self._held
        return True

    def _read_arguments(self, text: str, answer: list[str], *, ended: bool) -> None:
        assert self._arguments is not None
        was_done = self._arguments.done
        count, _ = self._arguments.push(text)
        answer.append(text[:count])
        if self._arguments.done and not was_done:
            answer.append("}")
        elif ended and not self._arguments.raw.strip():
            answer.append("{}}")

    def _called(self, header: str) -> str | None:
        """The function that a message calls."""
        recipient = _RECIPIENT.search(header)
        if recipient is None or not self._functions:
            return None
        name = recipient[1].removeprefix("functions.")
        return name if name != recipient[1] or name in self._functions else None

    def _is_shown(self, header: str) -> bool:
        channel = _CHANNEL.search(header)
        if channel is None or channel[1] == "final":
            return True
        return channel[1] == "commentary" and _RECIPIENT.search(header) is None
