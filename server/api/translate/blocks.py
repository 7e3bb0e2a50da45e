"""An answer as a row of blocks (thoughts, text, calls), as /v1/responses and /v1/messages show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.api.http.errors import ApiError
from server.text.answer import Part

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """One block; text is a call's arguments, too."""

    index: int
    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class BlockEvent:
    """A block begins, grows or ends."""

    action: Literal["start", "delta", "stop"]
    block: Block
    delta: str = ""


class Blocks:
    """Puts blocks together; a new one begins when the kind changes or a call starts."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def push(self, part: Part) -> list[BlockEvent]:
        """What a part of the answer does to the blocks."""
        events: list[BlockEvent] = []
        if part.reasoning:
            self._text("reasoning", part.reasoning, events)
        if part.content:
            self._text("text", part.content, events)
        for call in part.calls:
            if call.id is not None:
                self._begin(Block(len(self.all), "call", call_id=call.id, name=call.name or ""), events)
            self._grow(call.arguments, events)
        return events

    def finish(self) -> list[BlockEvent]:
        """The end of the last block."""
        if not self._open:
            return []
        self._open = False
        return [BlockEvent("stop", self.all[-1])]

    def _text(self, kind: Kind, text: str, events: list[BlockEvent]) -> None:
        if not self._open or self.all[-1].kind != kind:
            self._begin(Block(len(self.all), kind), events)
        self._grow(text, events)

    def _begin(self, block: Block, events: list[BlockEvent]) -> None:
        events += self.finish()
        self.all.append(block)
        self._open = True
        events.append(BlockEvent("start", block))

    def _grow(self, text: str, events: list[BlockEvent]) -> None:
        if text:
            self.all[-1].text += text
            events.append(BlockEvent("delta", self.all[-1], text))


def renamed(error: ApiError, names: dict[str, str]) -> ApiError:
    """An error of the chat that a request was turned into, in the request's own words."""
    for chat, own in names.items():
        if error.param is not None and error.param.startswith(chat):
            error.message = error.message.replace(chat, own)
            error.param = own + error.param[len(chat) :]
            break
    return error
