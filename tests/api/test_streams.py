"""Streams: errors that end one, and the time that long answers take."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from server.api.http.errors import bad_request
from server.api.http.streaming import error_event
from server.api.translate.content_blocks import ContentBlocks
from server.text.answer import CallDelta, Part


@pytest.mark.parametrize("anthropic", [False, True])
def test_an_error_that_ends_a_stream_is_one_line_to_splitlines(anthropic: bool) -> None:
    text = "a\u2028b\u2029c\x85d"
    *head, data = error_event(bad_request(text, None, None), anthropic=anthropic).decode().splitlines()[:-1]
    assert head == (["event: error"] if anthropic else [])
    written: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert written["error"]["message"] == text


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
