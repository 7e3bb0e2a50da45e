"""POST /v1/responses through the openai client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.api.conftest import MODEL, user

TOOL: Any = {
    "type": "function", "name": "get_weather", "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"],
                   "additionalProperties": False},
}  # fmt: skip


def test_text(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.responses.create(
        model=MODEL, input="What is the capital of France?", temperature=0, max_output_tokens=12
    )
    assert "Paris" in answer.output_text
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 12
    chat = {"model": MODEL, "messages": user("What is the capital of France?"), "temperature": 0, "max_tokens": 12}
    same = http.post("/v1/chat/completions", json=chat).json()
    assert answer.output_text == same["choices"][0]["message"]["content"]
    assert answer.usage.input_tokens == same["usage"]["prompt_tokens"]


def test_a_stream_that_is_cut_ends_its_item_as_incomplete(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="Tell me a story.", max_output_tokens=5) as stream:
        events = list(stream)
    assert events[-1].type == "response.incomplete"
    ended = next(event for event in events if event.type == "response.output_item.done")
    assert ended.item.status == events[-1].response.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL,
        input=[{"role": "user", "content": "Say hello."}],
        instructions="Be brief.",
        text={"format": {"type": "json_schema", "name": "greeting", "schema": {"enum": ["hello", "good morning"]}}},
    ) as stream:  # fmt: skip
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    added = next(event for event in events if event.type == "response.content_part.added")
    assert added.part.text == ""  # type: ignore[union-attr]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text
    assert final.status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_their_results(client: openai.OpenAI, stream: bool) -> None:
    question: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "The weather in Rome?"}]}]
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 100, "tools": [TOOL]}
    choice: Any = {"type": "function", "name": "get_weather"}
    if stream:
        with client.responses.stream(
            **options, input=question, tool_choice=choice, parallel_tool_calls=False
        ) as events:
            happened = list(events)
            first = events.get_final_response()
        kinds = [event.type for event in happened]
        added = next(event.item for event in happened if event.type == "response.output_item.added")
        assert (added.id[:3], added.type, added.name, added.arguments) == ("fc_", "function_call", "get_weather", "")
        assert "response.function_call_arguments.delta" in kinds
        assert "response.function_call_arguments.done" in kinds
    else:
        first = client.responses.create(**options, input=question, tool_choice=choice, parallel_tool_calls=False)
    (call,) = first.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
    second = client.responses.create(
        **options, input=[*question, *(item.model_dump() for item in first.output), result], tool_choice="none"
    )
    assert second.output_text


def test_structured(client: openai.OpenAI) -> None:
    class Pet(pydantic.BaseModel):
        kind: str = pydantic.Field(max_length=10)
        age: int = pydantic.Field(ge=0, le=30)

    answer = client.responses.parse(model=MODEL, input="A pet.", text_format=Pet, temperature=0)
    assert isinstance(answer.output_parsed, Pet)


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"stop": ["a"]}, "stop", "unsupported_parameter"),
        ({"n": 1, "seed": 5}, "seed", "unsupported_parameter"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        ({"repeat_penalty": 1.0, "n_predict": 5}, "n_predict", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": []}, "input", "empty_array"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]",
         "unsupported_parameter"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "king", "content": "a"}], "instructions": "Hi."}, "input[0].role", "invalid_value"),
        ({"input": [*user("a"), {"type": "function_call", "call_id": "a", "name": 5}]}, "input[1].name", "invalid_type"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id", "invalid_type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"tools": [{"type": "function", "name": "a", "parameters": 5}]}, "tools[0].parameters", "invalid_type"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type", "unsupported_parameter"),
        ({"max_output_tokens": 0}, "max_output_tokens", "value_out_of_range"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "y"}}}}, "text.format.schema",
         "invalid_grammar"),
        ({"text": {"format": {"type": "json_schema", "name": 5, "schema": {}}}}, "text.format.name", "invalid_type"),
    ],
)  # fmt: skip
def test_refused(http: httpx.Client, change: dict[str, Any], param: str, code: str) -> None:
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "a"} | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
