"""Time that a request may take: what the server allows, or less if the client says so."""

from __future__ import annotations

import math
from contextvars import ContextVar

from starlette.types import Scope

from server.api.http.errors import bad_request

HEADER = "X-Request-Timeout"
_asked: ContextVar[str | None] = ContextVar("asked", default=None)


def note_timeout(scope: Scope) -> None:
    """Remember this request's X-Request-Timeout header as it came; allowed_seconds() checks it."""
    name = HEADER.lower().encode()
    _asked.set(next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None))


def allowed_seconds(limit: float | None) -> float | None:
    """Seconds that this request may take: the server's limit, or less if the client asks. Raises ApiError."""
    asked = _asked.get()
    if asked is None:
        return limit
    try:
        seconds = float(asked)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise bad_request(
            f"{HEADER} must be a positive number of seconds, got {asked[:40]!r}.", HEADER, "invalid_value"
        )
    return seconds if limit is None else min(seconds, limit)
