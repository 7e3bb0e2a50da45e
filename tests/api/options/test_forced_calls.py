"""Forced calls of a model that knows no end: nothing is repeated, and what is cut is no markup and no empty call."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.conftest import MODEL, user

CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def ask(http: httpx.Client, **options: Any) -> httpx.Response:
    body = {
        "model": MODEL,
        "messages": user("a"),
        "tools": [TOOL],
        "tool_choice": "required",
        "logit_bias": {"2": -100},
    }
    answer = http.post(CHAT, json=body | options)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("seed", range(4))
def test_no_call_is_repeated(long_context: httpx.Client, seed: int) -> None:
    answer = ask(long_context, max_tokens=1000, temperature=1, n=3, seed=seed).json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        calls = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
        cities = [json.loads(arguments)["city"] for arguments in calls]
        assert len(set(cities)) == len(cities)
        assert 1 <= len(cities) <= 2
    assert long_context.get("/health").json()["status"] == "ready"


def test_what_is_cut_is_no_block(long_context: httpx.Client) -> None:
    anthropic = {"model": MODEL, "messages": user("a"), "tool_choice": {"type": "any"},
                 "tools": [{"name": "weather", "input_schema": PARAMETERS}]}  # fmt: skip
    for limit in range(1, 16):
        answer = long_context.post("/v1/messages", json=anthropic | {"max_tokens": limit, "temperature": 0}).json()
        if answer["stop_reason"] == "max_tokens":
            assert [block for block in answer["content"] if block["input"].keys() != {"city"}] == []
