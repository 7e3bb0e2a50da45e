"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.api.conftest import MODEL, user

PATH = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
          "additionalProperties": False}  # fmt: skip
TOOL = {
    "name": "get_weather",
    "description": "Weather.",
    "input_schema": SCHEMA,
    "cache_control": {"type": "ephemeral"},
}


def body(**options: Any) -> dict[str, Any]:
    question = user("What is the capital of France?")
    return {"model": MODEL, "max_tokens": 12, "messages": question, "temperature": 0} | options


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        found.append(document)
    return found


def test_text_whole_and_streamed(http: httpx.Client) -> None:
    whole = http.post(PATH, json=body()).json()
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert "Paris" in whole["content"][0]["text"]
    assert whole["usage"]["output_tokens"] == 12
    streamed = events(http.post(PATH, json=body(stream=True)))
    kinds = [event["type"] for event in streamed]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in streamed if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    start = streamed[0]["message"]["usage"]
    assert start["input_tokens"] + start["cache_read_input_tokens"] > 10
    assert streamed[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert streamed[-2]["usage"]["output_tokens"] == 12


def test_system_prefill_and_stop_sequence(http: httpx.Client) -> None:
    messages = [*body()["messages"], {"role": "assistant", "content": [{"type": "text", "text": "The capital is"}]}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer = http.post(PATH, json=body(messages=messages, system=system, stop_sequences=["aris"])).json()
    assert answer["content"][0]["text"].startswith(" P")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "aris")


@pytest.mark.parametrize("stream", [False, True])
def test_tools(http: httpx.Client, stream: bool) -> None:
    options = body(max_tokens=100, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    answer = http.post(PATH, json=options | {"stream": stream})
    if stream:
        happened = events(answer)
        block = next(event["content_block"] for event in happened if event["type"] == "content_block_start")
        written = "".join(e["delta"]["partial_json"] for e in happened if e["type"] == "content_block_delta")
        block = {**block, "input": json.loads(written)}
        assert happened[-2]["delta"]["stop_reason"] == "tool_use"
    else:
        assert answer.json()["stop_reason"] == "tool_use"
        (block,) = answer.json()["content"]
    assert (block["type"], block["name"]) == ("tool_use", "get_weather")
    jsonschema.validate(block["input"], SCHEMA)
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "22 degrees"}]}
    messages = [*options["messages"], {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    after = http.post(PATH, json=body(messages=messages, tools=[TOOL], tool_choice={"type": "none"}))
    assert after.json()["content"][0]["type"] == "text"


def test_a_form(long_context: httpx.Client) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    for named in ({"output_config": {"format": form}, "cache_control": {"type": "ephemeral"}}, {"output_format": form}):
        answer = long_context.post(PATH, json=body(max_tokens=100, **named)).json()
        assert answer["stop_reason"] == "end_turn"
        jsonschema.validate(json.loads(answer["content"][0]["text"]), SCHEMA)


def test_count_tokens(http: httpx.Client) -> None:
    asked = {"model": MODEL, "messages": body()["messages"]}
    count = http.post(f"{PATH}/count_tokens", json=asked).json()
    usage = http.post(PATH, json=body()).json()["usage"]
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert http.post(f"{PATH}/count_tokens", json=asked | {"tools": [TOOL]}).json()["input_tokens"] > 60


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"system": 5}, "'system'"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0]"),
        ({"messages": user([{"type": "image", "source": {}}])}, "messages[0].content[0]"),
        (
            {"messages": user([{"type": "document", "source": {"type": "base64", "data": "QQ=="}}])},
            "messages[0].content[0].source",
        ),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"messages": user([{"type": "tool_use", "id": "a", "name": "b", "input": {}}])}, "messages[0].content[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"name": "a", "input_schema": 5}]}, "'tools[1].input_schema'"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "'tools[0].name'"),
        ({"messages": user([{"type": "text"}])}, "needs a string 'text'"),
        ({"messages": user([{"type": "tool_result"}])}, "needs a string 'tool_use_id'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format.schema",
        ),
        ({"output_config": {"effort": "heroic"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}, "output_format": {"type": "json_schema"}}, "output_format"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_refused_in_anthropics_shape(http: httpx.Client, change: dict[str, Any], named: str) -> None:
    answer = http.post(PATH, json=body(**change))
    assert answer.status_code == 400
    document = answer.json()
    assert document["type"] == "error"
    assert document["error"]["type"] == "invalid_request_error"
    assert named in document["error"]["message"]


def test_unknown_model(http: httpx.Client) -> None:
    answer = http.post(PATH, json=body(model="claude"))
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("stream", [False, True])
def test_errors_that_come_while_an_answer_is_written_name_the_request_s_option(
    http: httpx.Client, stream: bool
) -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}
    form = {"format": {"type": "json_schema", "schema": wide}}
    answer = http.post(PATH, json=body(output_config=form, stream=stream))
    assert answer.status_code == (200 if stream else 400)
    error = events(answer)[-1]["error"] if stream else answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "'output_config.format.schema'" in error["message"]
