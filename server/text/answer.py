"""A chat answer's text, split as it comes: thoughts, content, tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.text.calls.parser import CallDelta, ToolParser
from server.text.reasoning import ReasoningSplitter


@dataclass
class Part:
    """What some text added to an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerParser:
    """Splits one answer. single_call drops every call after the first."""

    def __init__(
        self, reasoning: ReasoningSplitter | None = None, tools: ToolParser | None = None, *, single_call: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._single_call = single_call
        self.called = False
        """Whether there was a tool call."""

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thoughts."""
        return self._reasoning is not None and self._reasoning.thinking

    def push(self, text: str) -> Part:
        """What this text adds."""
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        return self._part(reasoning, *(self._tools.push(text) if self._tools is not None else (text, [])))

    def finish(self) -> Part:
        """What was held back, when the text ends."""
        reasoning, text = self._reasoning.finish() if self._reasoning is not None else ("", "")
        content, calls = self._tools.push(text) if self._tools is not None else (text, [])
        if self._tools is not None:
            more, last = self._tools.finish()
            content, calls = content + more, [*calls, *last]
        return self._part(reasoning, content, calls)

    def _part(self, reasoning: str, content: str, calls: list[CallDelta]) -> Part:
        if self._single_call:
            calls = [call for call in calls if call.index == 0]
        self.called = self.called or bool(calls)
        return Part(reasoning, content, calls)
