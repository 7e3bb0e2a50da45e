"""A chat answer's text, split as it comes: thoughts, content, tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from server.text.calls.parser import CallDelta, ToolParser
from server.text.calls.scanner import ObjectScanner
from server.text.harmony import HarmonySplitter
from server.text.reasoning import ReasoningSplitter


@dataclass
class Part:
    """Additions to an answer by some text."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, other: Part) -> None:
        """Take what comes next."""
        self.reasoning += other.reasoning
        self.content += other.content
        self.calls += other.calls

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


@dataclass
class _BegunCall:
    id: str | None
    name: str
    arguments: ObjectScanner = field(default_factory=lambda: ObjectScanner(of_call=False))


class ForcedCalls:
    """The calls of an answer that may be nothing but calls.

    The first call is passed on while it comes. Each later one is held back until it is complete, and dropped if it is
    cut; a small model would write the same call over and over, so one that repeats an earlier call ends the answer.
    """

    def __init__(self) -> None:
        self._begun: list[_BegunCall] = []
        self._complete: set[tuple[str, str]] = set()
        self.repeated = False
        """Whether a call was an earlier one once more; no call is passed on from then on."""

    def push(self, calls: Sequence[CallDelta]) -> list[CallDelta]:
        """The deltas that are passed on."""
        passed: list[CallDelta] = []
        for delta in calls:
            if self.repeated:
                break
            if delta.name is not None:
                self._begun.append(_BegunCall(delta.id, delta.name))
            begun = self._begun[delta.index]
            begun.arguments.push(delta.arguments)
            if delta.index == 0:
                passed.append(delta)
            if not begun.arguments.done:
                continue
            written = begun.arguments.raw
            call = _comparable(begun.name, written)
            self.repeated = call in self._complete
            self._complete.add(call)
            if delta.index > 0 and not self.repeated:
                passed.append(CallDelta(delta.index, begun.id, begun.name, written))
        return passed


def _comparable(name: str, arguments: str) -> tuple[str, str]:
    """A call with its arguments in one way of writing them."""
    try:
        return name, json.dumps(json.loads(arguments, strict=False), sort_keys=True)
    except (ValueError, RecursionError):
        return name, arguments


class AnswerParser:
    """Splits one answer.

    single_call drops every call after the first. forced: the answer may be nothing but calls, so other text in it is a
    part of a call that was cut, and dropped.
    """

    def __init__(
        self,
        reasoning: ReasoningSplitter | HarmonySplitter | None = None,
        tools: ToolParser | None = None,
        *,
        single_call: bool = False,
        forced: bool = False,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._single_call = single_call
        self._forced = ForcedCalls() if forced else None
        self.called = False

    @property
    def repeated(self) -> bool:
        """Whether a forced answer has begun to repeat its calls; nothing more belongs to it."""
        return self._forced is not None and self._forced.repeated

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thoughts."""
        return self._reasoning is not None and self._reasoning.thinking

    def push(self, text: str) -> Part:
        """Give the additions of this text."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        return self._part(reasoning, *(self._tools.push(text) if self._tools is not None else (text, [])))

    def finish(self) -> Part:
        """Give what was held back, at the end of the text."""
        reasoning, text = self._reasoning.finish() if self._reasoning is not None else ("", "")
        content, calls = self._tools.push(text) if self._tools is not None else (text, [])
        if self._tools is not None:
            more, last = self._tools.finish()
            content, calls = content + more, [*calls, *last]
        return self._part(reasoning, content, calls)

    def _part(self, reasoning: str, content: str, calls: list[CallDelta]) -> Part:
        if self._forced is not None:
            content, calls = "", self._forced.push(calls)
        if self._single_call:
            calls = [call for call in calls if call.index == 0]
        self.called = self.called or bool(calls)
        return Part(reasoning, content, calls)
