"""Tool calls whose names stand outside of JSON, in front of their arguments: Mistral's, DeepSeek's and Apertus'."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from server.text.calls.json_calls import JsonToolParser
from server.text.calls.parser import CallDelta, call_id, in_json, short_call_id
from server.text.calls.scanner import ObjectScanner
from server.text.holdback import split_at

_LONGEST_BEGINNING = 512
"""Characters in front of a call's arguments, beyond which there is none."""


@dataclass(frozen=True)
class Named:
    """A notation: start, calls with separator between them, end. A call is before, its name, between, arguments, after.

    These are marks and texts one after another.
    """

    start: tuple[str, ...]
    before: tuple[str, ...]
    between: tuple[str, ...]
    after: tuple[str, ...]
    separator: tuple[str, ...]
    end: tuple[str, ...]
    name: re.Pattern[str]
    """What models write from the mark on, or from the end of a call on, to the next one's arguments.

    It is looked for in each piece of an answer, so it has no way to divide blanks that go on and on.
    """
    call_end: re.Pattern[str] = re.compile("")
    """What they write behind arguments."""
    make_id: Callable[[], str] = call_id

    @property
    def mark(self) -> str:
        """What begins calls."""
        return (*self.start, *self.before)[0]

    @property
    def end_mark(self) -> str | None:
        """What ends them; None where a call is all that its mark begins."""
        return self.end[-1] if self.end else None

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks among the texts."""
        texts = dict.fromkeys((*self.start, *self.before, *self.between, *self.after, *self.end))
        return tuple(text for text in texts if re.fullmatch(r"<.*>|\[[A-Z_]+\]", text))

    def written(self, calls: Iterable[tuple[str, Any]]) -> str:
        """Calls, by their names and arguments, as a model writes them."""
        each = ("".join((*self.before, name, *self.between, in_json(given), *self.after)) for name, given in calls)
        return "".join((*self.start, "".join(self.separator).join(each), *self.end))


MISTRAL = Named(
    (), ("[TOOL_CALLS]",), ("[ARGS]",), (), (), (),
    name=re.compile(r"\s*([A-Za-z0-9_.\-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)"),
    make_id=short_call_id,
)  # fmt: skip
DEEPSEEK = Named(
    ("<｜tool▁calls▁begin｜>",), ("<｜tool▁call▁begin｜>",), ("<｜tool▁sep｜>",), ("<｜tool▁call▁end｜>",), (),
    ("<｜tool▁calls▁end｜>",),
    name=re.compile(
        r"\s*(?:<｜tool▁call▁begin｜>\s*)?(?:function\s*<｜tool▁sep｜>\s*)?([A-Za-z0-9_.\-]+)\s*(?:<｜tool▁sep｜>\s*)?"
        r"(?:```json\s*)?(?=\{)"
    ),
    call_end=re.compile(r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*"),
)  # fmt: skip
"""That of V3.1."""
DEEPSEEK_R1 = replace(
    DEEPSEEK, before=("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"), between=("\n```json\n",),
    after=("\n```", "<｜tool▁call▁end｜>"), separator=("\n",),
)  # fmt: skip
"""That of V3 and R1."""
APERTUS = Named(
    ("<|tools_prefix|>", "["), ('{"',), ('": ',), ("}",), (", ",), ("]", "<|tools_suffix|>"),
    name=re.compile(r'[\s\[,]*\{\s*"([^"\\]+)"\s*:\s*(?=\{)'), call_end=re.compile(r"\s*\}?[\s,\]]*"),
)  # fmt: skip


class NamedToolParser:
    """Reads calls in such a notation, and JSON behind the same mark, as Mistral's older models write it.

    A call is rewritten as JSON, which JsonToolParser reads.
    """

    def __init__(self, notation: Named) -> None:
        self._notation = notation
        self._end = notation.end_mark or ""
        self._json = JsonToolParser(notation.mark, notation.end_mark, make_id=notation.make_id)
        self._held = ""
        self._state: Literal["outside", "name", "arguments", "after"] = "outside"
        self._arguments = ObjectScanner(of_call=False)

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
                content, calls = self._json.finish()
                return content + self._notation.mark + text, calls
            case "after":
                text = self._notation.call_end.sub("", text, count=1)
                text = "" if (self._end + self._notation.mark).startswith(text) or self._begins_call(text) else text
        content, calls = self._json.push(text)
        more, last = self._json.finish()
        return content + more, [*calls, *last]

    def _begins_call(self, text: str) -> bool:
        first = "".join(self._notation.before)
        return first.startswith(text) or text.startswith(self._notation.before[0])

    def _read_outside(self, rewritten: list[str]) -> bool:
        """Whether to go on with what is held now, as the other methods of this kind."""
        part, mark, self._held = split_at(self._held, (self._notation.mark,))
        rewritten.append(part)
        self._state = "outside" if mark is None else "name"
        return mark is not None

    def _read_name(self, rewritten: list[str]) -> bool:
        named = self._notation.name.match(self._held)
        if named is not None:
            rewritten.append(f'{self._notation.mark}{{"name": {json.dumps(named[1])}, "arguments": ')
            self._held = self._held[named.end() :]
            self._state, self._arguments = "arguments", ObjectScanner(of_call=False)
            return True
        ends = self._end in self._held if self._end else self._held.lstrip()[:1] in ("[", "{")
        other = ends or len(self._held) > _LONGEST_BEGINNING
        if other:  # JSON, or no call
            rewritten.append(self._notation.mark)
            self._state = "outside"
        return other

    def _read_arguments(self, rewritten: list[str]) -> bool:
        count, _ = self._arguments.push(self._held)
        rewritten.append(self._held[:count])
        self._held = self._held[count:]
        if self._arguments.done:
            rewritten.append("}" + self._end)
            self._state = "after" if self._end else "outside"
        return bool(self._held)

    def _read_after(self, _: list[str]) -> bool:
        """Behind a call: the mark of the end, or one more call."""
        behind = self._held[self._notation.call_end.match(self._held).end() :]  # type: ignore[union-attr]
        if behind.startswith(self._end):
            self._held, self._state = behind[len(self._end) :], "outside"
            return bool(self._held)
        named = self._notation.name.match(behind)
        if named is None and len(behind) <= _LONGEST_BEGINNING:
            return False
        self._held, self._state = behind, "outside" if named is None else "name"
        return True
