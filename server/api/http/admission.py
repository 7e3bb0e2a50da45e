"""Limits of sequences and of prompts' tokens under way at once, and when to come back if there are too many."""

from __future__ import annotations

import math
from collections.abc import Callable

from server.api.http.counts import SEQUENCES, TOKENS, Counts
from server.api.http.errors import queue_full

MAX_RETRY_AFTER_S = 60


class Admission:
    """Counts sequences and their prompts' tokens from acceptance to end; refuses beyond limits."""

    def __init__(self, limit: int, token_limit: int = 1_000_000, counts: Counts | None = None) -> None:
        """counts: those that all API processes share; None where this one is the only one."""
        self.limit = limit
        self.token_limit = token_limit
        self._counts = counts or Counts()

    @property
    def held(self) -> int:
        """Sequences under way."""
        return self._counts.total(SEQUENCES)

    @property
    def held_tokens(self) -> int:
        """Tokens of their prompts."""
        return self._counts.total(TOKENS)

    def acquire(self, count: int) -> Ticket:
        """Reserve room for count sequences until the ticket is released. Raises ApiError (429) when there is none."""
        with self._counts.locked():
            held = self.held
            if not held:
                self._counts.forget_ends()
            missing = held + count - self.limit
            if missing > 0:
                raise queue_full(self._retry_after_s(missing))
            self._counts.add(SEQUENCES, count)
        return Ticket(self, count)

    def hold_tokens(self, count: int) -> None:
        """Count a ticket's tokens. A prompt longer than the limit is admitted only alone. Raises ApiError (429)."""
        with self._counts.locked():
            held = self.held_tokens
            if held and held + count > self.token_limit:
                raise queue_full(self._retry_after_s(1))
            self._counts.add(TOKENS, count)

    def released(self, count: int, tokens: int) -> None:
        """Subtract a released ticket's sequences and tokens from the counts."""
        with self._counts.locked():
            self._counts.add(SEQUENCES, -count)
            self._counts.add(TOKENS, -tokens)
            self._counts.ended(count)

    def _retry_after_s(self, missing: int) -> int:
        """Seconds until `missing` sequences will have ended, judged by how fast the latest ones ended."""
        each = self._counts.seconds_per_end()
        return 1 if each is None else min(MAX_RETRY_AFTER_S, max(1, math.ceil(each * missing)))


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
