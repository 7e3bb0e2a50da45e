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


def test_streamed_calls_end_alike(long_context: httpx.Client) -> None:
    whole = ask(long_context, max_tokens=1000, temperature=1, seed=1).json()["choices"][0]["message"]["tool_calls"]
    streamed = ask(long_context, max_tokens=1000, temperature=1, seed=1, stream=True).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    written: dict[int, str] = {}
    for chunk in chunks:
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            written[call["index"]] = written.get(call["index"], "") + call["function"]["arguments"]
    assert list(written.values()) == [call["function"]["arguments"] for call in whole]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_what_is_cut_is_no_markup_and_no_empty_call(long_context: httpx.Client) -> None:
    for limit in range(1, 24):
        (choice,) = ask(long_context, max_tokens=limit, temperature=0).json()["choices"]
        message = choice["message"]
        if choice["finish_reason"] != "length":
            break
        assert not message["content"]
        for call in message.get("tool_calls", ()):
            assert call["function"]["name"] == "weather"
            assert call["function"]["arguments"].startswith("{")
    assert limit > 10
    anthropic = {"model": MODEL, "messages": user("a"), "tool_choice": {"type": "any"},
                 "tools": [{"name": "weather", "input_schema": PARAMETERS}]}  # fmt: skip
    for limit in range(1, 16):
        answer = long_context.post("/v1/messages", json=anthropic | {"max_tokens": limit, "temperature": 0}).json()
        if answer["stop_reason"] == "max_tokens":
            assert [block for block in answer["content"] if block["input"].keys() != {"city"}] == []


@pytest.mark.parametrize("stop", ["\n", '"', "}", "Observation", "<tool_call>"])
def test_stop_strings_do_not_cut_calls(long_context: httpx.Client, stop: str) -> None:
    options: dict[str, Any] = {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 100, "stop": [stop]}
    (choice,) = ask(long_context, **options).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
