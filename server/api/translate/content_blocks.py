"""An answer as a list of content blocks (thoughts, text, calls), as /v1/responses and /v1/messages show it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from server.text.answer import Part

Kind = Literal["reasoning", "text", "call"]


@dataclass
class ContentBlock:
    """One content block; a call's text is its arguments."""

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    """The deltas of the text; appending each to one string would take time that grows with its square."""

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.pieces)

    def empty(self) -> ContentBlock:
        """The block as it began, without text."""
        return replace(self, pieces=[])


@dataclass(frozen=True)
class ContentBlockEvent:
    """A content block begins, grows or ends."""

    action: Literal["start", "delta", "stop"]
    block: ContentBlock
    delta: str = ""


class ContentBlocks:
    """Makes content blocks of an answer's parts; a new one begins when the kind changes or a call starts."""

    def __init__(self) -> None:
        self.all: list[ContentBlock] = []
        self._open = False

    def push(self, part: Part) -> list[ContentBlockEvent]:
        """The events that a part of the answer causes."""
        events: list[ContentBlockEvent] = []
        if part.reasoning:
            self._text("reasoning", part.reasoning, events)
        if part.content:
            self._text("text", part.content, events)
        for call in part.calls:
            if call.id is not None:
                self._begin(ContentBlock(len(self.all), "call", call_id=call.id, name=call.name or ""), events)
            self._grow(call.arguments, events)
        return events

    def finish(self) -> list[ContentBlockEvent]:
        """The event that ends the last block, if one is open."""
        if not self._open:
            return []
        self._open = False
        return [ContentBlockEvent("stop", self.all[-1])]

    def _text(self, kind: Kind, text: str, events: list[ContentBlockEvent]) -> None:
        if not self._open or self.all[-1].kind != kind:
            self._begin(ContentBlock(len(self.all), kind), events)
        self._grow(text, events)

    def _begin(self, block: ContentBlock, events: list[ContentBlockEvent]) -> None:
        events += self.finish()
        self.all.append(block)
        self._open = True
        events.append(ContentBlockEvent("start", block))

    def _grow(self, text: str, events: list[ContentBlockEvent]) -> None:
        if text:
            self.all[-1].pieces.append(text)
            events.append(ContentBlockEvent("delta", self.all[-1], text))
