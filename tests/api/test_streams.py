"""Streams: errors that end one, and the time that long answers take."""

from __future__ import annotations

import json
import time

import pytest

from server.api.http.errors import bad_request
from server.api.http.streaming import error_event, event
from server.api.translate.content_blocks import ContentBlocks
from server.text.answer import CallDelta, Part

TEXT = "a\u2028b\u2029c\x85d\\\u2028e"
ERROR = bad_request(TEXT, None, None)
EVENTS = [
    (event({"error": {"message": TEXT}}), []),
    (event({"error": {"message": TEXT}}, "kind"), ["event: kind"]),
    (error_event(ERROR), []),
    (error_event(ERROR, anthropic=True), ["event: error"]),
]


@pytest.mark.parametrize(("written", "before"), EVENTS, ids=["event", "named", "error", "anthropic"])
def test_an_events_data_is_one_line_to_splitlines(written: bytes, before: list[str]) -> None:
    """As some clients read them, httpx' iter_lines() too: U+0085, U+2028 and U+2029 end a line there."""
    *head, data, end = written.decode().splitlines()
    assert (head, end) == (before, "")
    assert json.loads(data.removeprefix("data: "))["error"]["message"] == TEXT


@pytest.mark.parametrize("part", [Part(content="x" * 40), Part(calls=[CallDelta(0, None, None, "x" * 40)])])
def test_blocks_grow_in_time_that_is_proportional_to_their_length(part: Part) -> None:
    def seconds(pieces: int) -> float:
        blocks = ContentBlocks()
        blocks.push(Part(calls=[CallDelta(0, "call", "f", "")]) if part.calls else part)
        began = time.thread_time()
        for _ in range(pieces):
            blocks.push(part)
        taken = time.thread_time() - began
        assert len(blocks.all[-1].text) >= 40 * pieces
        return taken

    seconds(1000)
    assert seconds(40_000) < 12 * seconds(10_000)
