"""Common parts of parsers of tool calls: their interface, what they report, ids of calls."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass
from typing import Any, Protocol

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True)
class CallDelta:
    """Additions to the index-th call of an answer; id and name come with its first delta, and only then."""

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


def in_json(arguments: Any) -> str:
    """Arguments as a template gets them, which are an object or a text that is none."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class ToolParser(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """(text that belongs to no call, what was added to calls)."""
        ...

    def finish(self) -> tuple[str, list[CallDelta]]:
        """The same for what was held back, when the answer ends."""
        ...
