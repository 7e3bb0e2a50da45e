"""Tool calls in a model's answer, taken out of the text as it comes."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from server.text.holdback import overlap, split_at
from server.text.jsonscan import ObjectScanner

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CallDelta:
    """What was added to the index-th call of an answer; id and name come with its first delta, and only then."""

    index: int
    id: str | None
    name: str | None
    arguments: str


def call_id() -> str:
    """An id as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """An id that Mistral's templates take: nine letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class ToolParser(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """(text that belongs to no call, what was added to calls)."""
        ...

    def finish(self) -> tuple[str, list[CallDelta]]:
        """The same for what was held back, when the answer ends."""
        ...


class JsonToolParser:
    """Calls as JSON objects: between marks (`<tool_call>{...}</tool_call>`), after one ([TOOL_CALLS], <|python_tag|>), or
    as the whole answer where bare is set (Llama). Arrays of calls, and separators between them, are taken too.

    Something that is no call after all is given back as text.
    """

    def __init__(
        self, start: str, end: str | None, *, bare: bool = False, make_id: Callable[[], str] = call_id
    ) -> None:
        self._start = start
        self._end = end
        self._bare = bare
        self._make_id = make_id
        self._held = ""
        self._inside = False
        # What was read since a call's mark, with it, for as long as there is no call; None from then on.
        self._unused: str | None = None
        self._at_beginning = True
        self._scanner: ObjectScanner | None = None
        self._named = False
        self._after_call = False
        self._calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """See ToolParser.push."""
        self._held += text
        content: list[str] = []
        calls: list[CallDelta] = []
        while self._held and (self._read_inside(content, calls) if self._inside else self._read_outside(content)):
            pass
        return "".join(content), calls

    def finish(self) -> tuple[str, list[CallDelta]]:
        """See ToolParser.push."""
        text, self._held = self._held, ""
        if not self._inside:
            return text, []
        if self._scanner is not None:
            return ("" if self._named else self._before_object() + self._scanner.raw + text), []
        return ("" if self._unused is None else self._unused + text), []

    def _read_outside(self, content: list[str]) -> bool:
        """Whether to go on with what is held now."""
        if self._bare and self._at_beginning:
            if not self._held.strip():
                return False
            if self._held.lstrip()[0] == "{":
                self._inside, self._at_beginning, self._unused = True, False, ""
                return True
        text, mark, self._held = split_at(self._held, (self._start,))
        if self._after_call:  # line ends between calls are no content
            text = text.lstrip()
            self._after_call = not text
        content.append(text)
        self._at_beginning = self._at_beginning and not text.strip()
        self._inside, self._unused = mark is not None, mark
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
        self._report(self._scanner, arguments, calls)
        if self._scanner.failed or (self._scanner.done and not self._named and not self._nested(calls)):
            content.append(self._give_up())
        if self._scanner is not None and self._scanner.done:
            self._scanner, self._after_call = None, True
        return bool(self._held)

    def _skip(self, count: int) -> None:
        if self._unused is not None:
            self._unused += self._held[:count]
        self._held = self._held[count:]

    def _before_object(self) -> str:
        """What an object that is no call is given back with."""
        if self._unused is None:
            return "" if self._bare else self._start
        return self._unused

    def _report(self, scanner: ObjectScanner, arguments: str, calls: list[CallDelta]) -> None:
        if self._named:
            if arguments:
                calls.append(CallDelta(self._calls - 1, None, None, arguments))
        elif scanner.name is not None:
            self._named, self._unused = True, None
            calls.append(CallDelta(self._calls, self._make_id(), scanner.name, arguments))
            self._calls += 1

    def _nested(self, calls: list[CallDelta]) -> bool:
        """OpenAI's own form: {"type": "function", "function": {...}}."""
        assert self._scanner is not None
        try:
            inner = json.loads(self._scanner.raw, strict=False).get("function")
        except ValueError:
            return False
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            return False
        arguments = inner.get("arguments", inner.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(CallDelta(self._calls, self._make_id(), inner["name"], written))
        self._calls += 1
        self._unused = None
        return True

    def _give_up(self) -> str:
        assert self._scanner is not None
        given_back = "" if self._named else self._before_object() + self._scanner.raw
        self._scanner, self._inside, self._at_beginning = None, False, False
        return given_back


class WrittenToolParser:
    """Calls in a notation of their own, each between two marks, read when it is complete.

    read turns what stands between the marks into (name, arguments as JSON), or None where it is no call.
    """

    def __init__(self, start: str, end: str, read: Callable[[str], tuple[str, str] | None]) -> None:
        self._start, self._end, self._read = start, end, read
        self._held = ""
        self._inside = False
        self._body = ""
        self._after_call = False
        self._calls = 0

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """See ToolParser.push."""
        self._held += text
        content, calls = "", []
        while self._held:
            part, mark, self._held = split_at(self._held, (self._end if self._inside else self._start,))
            if self._inside:
                self._body += part
                if mark is not None:
                    call = self._read(self._body)
                    if call is None:
                        content += self._start + self._body + self._end
                    else:
                        calls.append(CallDelta(self._calls, call_id(), *call))
                        self._calls += 1
                        self._after_call = True
                    self._body = ""
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
        return (self._start + self._body + text if self._inside else text), []


_MISTRAL_NAMED = re.compile(r"\s*([A-Za-z0-9_.\-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)")


class MistralToolParser:
    """Mistral's two notations: `[TOOL_CALLS][{"name": ..., "arguments": ...}]` and `[TOOL_CALLS]name[ARGS]{...}`."""

    START = "[TOOL_CALLS]"

    def __init__(self) -> None:
        self._json = JsonToolParser(self.START, None, make_id=short_call_id)
        self._held = ""
        self._inside = False
        self._rewritten = False

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


def read_gemma_call(body: str, quote: str) -> tuple[str, str] | None:
    """`call:name{key:value,...}` with strings between quote marks, as Gemma's function-calling models write it."""
    named = re.fullmatch(r"\s*call:([A-Za-z0-9_.\-]+)\s*(\{.*\})\s*", body, re.DOTALL)
    if named is None:
        return None
    pieces = named[2].split(quote)
    written = ""
    for i, piece in enumerate(pieces):
        # Outside of strings, keys have no quotes.
        written += json.dumps(piece) if i % 2 else re.sub(r"([{,]\s*)([A-Za-z_][\w.\-]*)\s*:", r'\1"\2":', piece)
    try:
        arguments = json.loads(written)
    except ValueError:
        return None
    return named[1], json.dumps(arguments, ensure_ascii=False)
