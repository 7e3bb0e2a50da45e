"""How many sequences may be under way at once, and when to come back if they are too many."""

from __future__ import annotations

import math
import time
from collections import deque

from server.api.errors import queue_full

MAX_RETRY_AFTER_S = 60


class Admission:
    """Counts sequences from acceptance to end; refuses beyond a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._releases: deque[float] = deque(maxlen=64)

    def acquire(self, count: int) -> Ticket:
        """Room for count sequences until the ticket is released. Raises ApiError (429) when there is none."""
        if self.held + count > self.limit:
            raise queue_full(self._retry_after_s(self.held + count - self.limit))
        self.held += count
        return Ticket(self, count)

    def released(self, count: int) -> None:
        """Called by tickets."""
        self.held -= count
        now = time.monotonic()
        self._releases.extend([now] * count)

    def _retry_after_s(self, missing: int) -> int:
        """Seconds until that many sequences will have ended, going by the latest ones."""
        if len(self._releases) < 2:
            return 1
        each = (time.monotonic() - self._releases[0]) / len(self._releases)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(each * missing)))


class Ticket:
    """Room for some sequences. Releasing twice is harmless."""

    def __init__(self, admission: Admission, count: int) -> None:
        self._admission = admission
        self._count = count

    def release(self) -> None:
        """Give the room back."""
        count, self._count = self._count, 0
        if count:
            self._admission.released(count)
