"""How many sequences, and how long prompts, may be under way at once, and when to come back if there are too many."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from server.api.http.errors import queue_full

MAX_RETRY_AFTER_S = 60


class Admission:
    """Counts sequences and their prompts' tokens from acceptance to end; refuses beyond limits."""

    def __init__(self, limit: int, token_limit: int = 1_000_000) -> None:
        self.limit = limit
        self.held = 0
        self.token_limit = token_limit
        self.held_tokens = 0
        self._releases: deque[float] = deque(maxlen=64)

    def acquire(self, count: int) -> Ticket:
        """Room for count sequences until the ticket is released. Raises ApiError (429) when there is none."""
        if self.held + count > self.limit:
            raise queue_full(self._retry_after_s(self.held + count - self.limit))
        self.held += count
        return Ticket(self, count)

    def hold_tokens(self, count: int) -> None:
        """Count a ticket's tokens. A prompt longer than the limit is admitted only alone. Raises ApiError (429)."""
        if self.held_tokens and self.held_tokens + count > self.token_limit:
            raise queue_full(self._retry_after_s(1))
        self.held_tokens += count

    def released(self, count: int, tokens: int) -> None:
        """Take a released ticket's sequences and tokens off the counts."""
        self.held -= count
        self.held_tokens -= tokens
        now = time.monotonic()
        self._releases.extend([now] * count)

    def _retry_after_s(self, missing: int) -> int:
        """Seconds until `missing` sequences will have ended, judged by how fast the latest ones ended."""
        if len(self._releases) < 2:
            return 1
        each = (time.monotonic() - self._releases[0]) / len(self._releases)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(each * missing)))


class Ticket:
    """Room for some sequences. Releasing twice is harmless."""

    def __init__(self, admission: Admission, count: int) -> None:
        self._admission = admission
        self._count = count
        self._tokens = 0
        self._on_release: list[Callable[[], None]] = []

    def on_release(self, call: Callable[[], None]) -> None:
        """Call once when the room is given back."""
        self._on_release.append(call)

    def hold_tokens(self, count: int) -> None:
        """Count this many tokens of prompts, too. Raises ApiError (429) when there are too many under way."""
        self._admission.hold_tokens(count)
        self._tokens += count

    def release(self) -> None:
        """Give the room back."""
        count, self._count = self._count, 0
        if count:
            self._admission.released(count, self._tokens)
        calls, self._on_release = self._on_release, []
        for call in calls:
            call()
