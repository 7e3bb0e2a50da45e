"""Time that a request may take: the shorter one of the server's limit and the client's."""

from __future__ import annotations

import pytest

from server.api.http.deadline import allowed_seconds, note_timeout


@pytest.mark.parametrize(
    ("limit", "asked", "allowed"),
    [(None, None, None), (5.0, None, 5.0), (5.0, b"3", 3.0), (5.0, b"60", 5.0), (None, b"60", 60.0)],
)
def test_the_shorter_limit_counts(limit: float | None, asked: bytes | None, allowed: float | None) -> None:
    note_timeout({"headers": [] if asked is None else [(b"x-request-timeout", asked)]})
    assert allowed_seconds(limit) == allowed
