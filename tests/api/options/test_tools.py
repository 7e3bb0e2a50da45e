"""Tool calls through the openai client: forced ones keep to the schema, streamed ones have id, type and name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.api.conftest import MODEL, chat_body, user

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["c", "f"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {},
                                                                          "additionalProperties": False}}}  # fmt: skip
TOOLS: Any = [WEATHER, CLOCK]
QUESTION: Any = user("What is the weather in Paris? Use celsius.")
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def check_calls(calls: list[Any]) -> None:
    assert calls
    assert len({call.id for call in calls}) == len(calls)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for call in calls:
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_forced_calls(quick: openai.OpenAI, choice: Any, temperature: float) -> None:
    answer = quick.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, n=2, seed=3,
        temperature=temperature, max_tokens=150,
    )  # fmt: skip
    ended = [c for c in answer.choices if c.finish_reason != "length"]
    assert ended
    for one in ended:
        assert one.finish_reason == "tool_calls"
        assert one.message.content is None
        check_calls(one.message.tool_calls or [])
        assert len(one.message.tool_calls or []) == 1
        if choice == NAMED:
            assert (one.message.tool_calls or [])[0].function.name == "get_weather"


def test_streamed_calls_are_those_of_the_whole_answer(quick: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": "required", "temperature": 0,
        "max_tokens": 120, "parallel_tool_calls": False,
    }  # fmt: skip
    whole = quick.chat.completions.create(**options).choices[0].message.tool_calls or []
    calls: dict[int, dict[str, str]] = {}
    reasons = []
    for chunk in quick.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            reasons.append(choice.finish_reason)
            for delta in choice.delta.tool_calls or []:
                assert delta.function is not None
                if delta.index not in calls:
                    assert delta.id
                    assert delta.type == "function"
                    assert delta.function.name
                    calls[delta.index] = {"name": delta.function.name, "arguments": ""}
                else:
                    assert delta.id is None
                    assert delta.function.name is None
                calls[delta.index]["arguments"] += delta.function.arguments or ""
    assert reasons[-1] == "tool_calls"
    assert [(call["name"], call["arguments"]) for call in calls.values()] == [
        (call.function.name, call.function.arguments) for call in whole
    ]


def test_a_whole_conversation(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice=NAMED, temperature=0, max_tokens=150
    )
    message = first.choices[0].message
    calls = message.tool_calls or []
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "21 degrees"} for call in calls]
    answer = client.chat.completions.create(
        model=MODEL, messages=[*QUESTION, message, *results], tools=TOOLS, tool_choice="none", temperature=0,
        max_tokens=40,
    )  # fmt: skip
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content


def test_auto_answers_or_calls(http: httpx.Client) -> None:
    choice = http.post(CHAT, json=chat_body(messages=QUESTION, tools=TOOLS, max_tokens=80)).json()["choices"][0]
    called = "tool_calls" in choice["message"]
    assert called == (choice["finish_reason"] == "tool_calls") or choice["finish_reason"] == "length"


def test_a_form_or_a_call(long_context: httpx.Client) -> None:
    """With tools to choose and a schema for the answer, it is one or the other."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(2):
        body = chat_body(messages=QUESTION, tools=[CLOCK], response_format=form, temperature=1.5, seed=seed)
        message = long_context.post(CHAT, json=body | {"max_tokens": 100}).json()["choices"][0]["message"]
        if "tool_calls" in message:
            assert message["tool_calls"][0]["function"]["name"] == "clock"
        else:
            jsonschema.validate(json.loads(message["content"]), schema)
    # Agents send the form of their last answer beside a call that is forced before it.
    forced = chat_body(messages=QUESTION, tools=[CLOCK], tool_choice="required", max_tokens=100)
    answer = long_context.post(CHAT, json=forced | {"response_format": form}).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    assert not answer["message"]["content"]
    form["json_schema"] = {"name": "x", "schema": 3}
    assert long_context.post(CHAT, json=forced | {"response_format": form}).json()["error"]["code"] == "invalid_grammar"
    both = long_context.post(CHAT, json=forced | {"structured_outputs": {"regex": "a"}})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "tool_choice")


def test_allowed_tools(http: httpx.Client) -> None:
    """The model is told of these alone, whether it has to call one or not."""
    named = {"type": "function", "function": {"name": "clock"}}

    def asked(mode: str, *listed: Any) -> httpx.Response:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(listed)}}
        return http.post(CHAT, json=chat_body(tools=TOOLS, tool_choice=choice, max_tokens=60))

    forced = asked("required", named).json()
    assert {call["function"]["name"] for call in forced["choices"][0]["message"]["tool_calls"]} == {"clock"}
    alone = http.post(CHAT, json=chat_body(tools=[CLOCK])).json()["usage"]["prompt_tokens"]
    assert forced["usage"]["prompt_tokens"] == asked("auto", named).json()["usage"]["prompt_tokens"] == alone
    for wrong in (
        asked("auto", {"type": "function", "function": {"name": "other"}}),
        asked("auto", "clock"),
        asked("some"),
    ):
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tool_choice")
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {
        "model": MODEL,
        "input": "Hi",
        "tools": tools,
        "tool_choice": choice,
        "max_output_tokens": 60,
        "temperature": 0,
    }
    output = http.post("/v1/responses", json=body).json()["output"]
    assert {item["name"] for item in output} == {"clock"}


def test_usage_counts_the_tools(http: httpx.Client) -> None:
    plain = http.post(CHAT, json=chat_body()).json()["usage"]["prompt_tokens"]
    assert http.post(CHAT, json=chat_body(tools=TOOLS)).json()["usage"]["prompt_tokens"] > plain + 50
    assert http.post(CHAT, json=chat_body(tools=TOOLS, tool_choice="none")).json()["usage"]["prompt_tokens"] == plain


def test_timings(http: httpx.Client) -> None:
    choice = http.post(CHAT, json=chat_body(timings=True, max_tokens=4)).json()["choices"][0]
    assert choice["timings"]["prefill"] > 0
    assert choice["timings"]["linear_prefill"] > 0
    assert "timings" not in http.post(CHAT, json=chat_body()).json()["choices"][0]
    text = http.post(CHAT, json=chat_body(timings=True, stream=True)).text
    assert text.count('"timings"') == 1


def test_null_within_a_schema_stays(quick: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"x": {"const": None}}, "required": ["x"], "additionalProperties": False}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    answer = quick.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[tool], tool_choice="required", max_tokens=60, parallel_tool_calls=False
    )
    assert json.loads((answer.choices[0].message.tool_calls or [])[0].function.arguments) == {"x": None}
