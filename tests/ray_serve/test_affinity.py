"""Beginnings of prompts, and where they were sent: what prefix affinity goes by. Ray itself is not needed here."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import pytest

from server.ray_serve.affinity import BLOCK_BYTES, MOST_BLOCKS, Beginnings, beginnings


def text(length: int) -> str:
    return "".join(random.choices(string.ascii_letters, k=length))


def chat(*contents: Any, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": content} for content in contents]
    return json.dumps({"messages": messages, "model": "m"} | fields).encode()


def shared(first: bytes, second: bytes) -> int:
    return sum(a == b for a, b in zip(beginnings(first), beginnings(second), strict=False))


def test_longer_prompts_share_the_beginning() -> None:
    system, question = text(1000), text(300)
    assert shared(chat(system, question), chat(system, text(300))) == pytest.approx(1000 / BLOCK_BYTES, abs=1)
    assert shared(chat(system), chat(system, question)) >= 1000 // BLOCK_BYTES - 1
    assert shared(chat(text(1000)), chat(text(1000))) == 0
    # Sampling does not change what is in the cache; the model and tools do.
    assert beginnings(chat(system, temperature=0)) == beginnings(chat(system, stream=True))
    assert shared(chat(system), chat(system, model="other")) == 0
    assert shared(chat(system), chat(system, tools=[{"type": "function"}])) == 0


def test_every_dialect_has_beginnings() -> None:
    prompt = text(500)
    for body in (
        {"prompt": prompt},
        {"prompt": list(range(200))},
        {"input": prompt},
        {"system": prompt, "messages": []},
    ):
        assert len(beginnings(json.dumps(body).encode())) >= 3
    assert len(beginnings(chat(text(10**6)))) == MOST_BLOCKS


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b'{"model": "m"}', b"[" * 10**6, b'{"messages":' * 10**5])
def test_what_is_no_prompt_has_none(body: bytes) -> None:
    assert beginnings(body) == ()


def test_the_longest_beginning_counts() -> None:
    known = Beginnings(capacity=100)
    a, b, c, d = (bytes([i]) for i in range(4))
    known.record([a, b], "x")
    known.record([a, c, d], "y")
    assert known.find([a, b], {"x", "y"}) == ("x", 2)
    assert known.find([a, c], {"x", "y"}) == ("y", 2)
    assert known.find([a], {"x", "y"}) == ("y", 1)
    # A replica that is gone is not found, a shorter beginning elsewhere is.
    assert known.find([a, b], {"y"}) == ("y", 1)
    assert known.find([d], {"x"}) == (None, 0)
    assert known.find([], {"x"}) == (None, 0)


def test_the_oldest_are_forgotten() -> None:
    known = Beginnings(capacity=3)
    for i in range(5):
        known.record([bytes([i])], "x")
    assert [known.find([bytes([i])], {"x"})[1] for i in range(5)] == [0, 0, 1, 1, 1]


def test_blocks_are_counted_where_they_were_sent_last() -> None:
    known = Beginnings(capacity=4)
    a, b, c, d, e = (bytes([i]) for i in range(5))
    known.record([a, b, c], "x")
    assert (known.count("x"), known.count("y")) == (3, 0)
    known.record([a, d], "y")
    assert (known.count("x"), known.count("y")) == (2, 2)
    known.record([e], "y")  # forgets b, the oldest
    assert (known.count("x"), known.count("y")) == (1, 3)
    known.record([a, b, d, e], "z")
    assert (known.count("x"), known.count("y"), known.count("z")) == (0, 0, 4)
