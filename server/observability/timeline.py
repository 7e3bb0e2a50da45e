"""When a sequence arrived, had its tokens and ended, on the monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

from server.types import FinishReason, RequestTimings


@dataclass(slots=True)
class RequestTimeline:
    """The times of one sequence, in seconds of time.monotonic(), and its tokens."""

    arrival: float = field(default_factory=time.monotonic)
    """When the server had received the whole body of the request."""
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    max_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    adapter: str | None = None
    finish_reason: FinishReason | None = None
    timings: RequestTimings | None = None
    """The engine's own times, as it sent them last."""

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def total(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished is None else self.finished - self.arrival

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second after the first one; None for fewer than two tokens."""
        if self.first_token is None or self.last_token is None or self.generation_tokens < 2:
            return None
        elapsed = self.last_token - self.first_token
        return (self.generation_tokens - 1) / elapsed if elapsed > 0 else None


timelines: ContextVar[list[RequestTimeline] | None] = ContextVar("timelines", default=None)
"""Timelines of the HTTP request that is being answered. The API's outermost middleware sets it, answering fills it."""


def server_timing(sequences: Iterable[RequestTimeline]) -> str:
    """A Server-Timing header, in milliseconds, of one HTTP request's sequences; empty when no sequence has timings.

    queue, prefill and decode are the longest sequence's; dequant and linear, shares of the device's time, are summed.
    """
    known = [sequence.timings for sequence in sequences if sequence.timings is not None]
    if not known:
        return ""
    seconds = {
        "queue": max(t.queue for t in known),
        "prefill": max(t.prefill for t in known),
        "decode": max(t.decode for t in known),
        "dequant": sum(t.dequant_prefill + t.dequant_decode for t in known),
        "linear": sum(t.linear_prefill + t.linear_decode for t in known),
    }
    return ", ".join(f"{name};dur={1000 * value:.3f}" for name, value in seconds.items())
