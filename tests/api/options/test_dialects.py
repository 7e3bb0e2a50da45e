"""Answers of a model whose chat template is unlike the embedded model's: calls as Llama writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import MODEL, chat_body, user
from tests.clients.random_model import write_random_model
from tests.conftest import serving

pytestmark = pytest.mark.rest

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if silent %}{% set messages = [] %}{% set add_generation_prompt = false %}{% endif %}"
    "{% if tools %}<|im_start|>system\n"
    """Answer with {"name": function name, "parameters": dictionary}. {{ tools | tojson }}<|im_end|>\n{% endif %}"""
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    """{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", "parameters": """
    "{% for key, value in c.function.arguments | items %}{{ key }}={{ value }};{% endfor %}}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PERSON = {"type": "object", "properties": {"name": {"enum": ["Ann"]}, "age": {"enum": [31]}}, "required": ["name", "age"],
          "additionalProperties": False}  # fmt: skip
ANSWER = {"name": "Ann", "age": 31}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.fixture(scope="module")
def llama(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server with a small random model that has this template."""
    folder = tmp_path_factory.mktemp("llama")
    config = write_random_model(folder, embedded_folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(folder, config) as client:
        yield client


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def documents(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def test_json_with_a_name_is_an_answer(llama: httpx.Client) -> None:
    """If tools may be called, an answer that a schema bounds is the one or the other, on every endpoint alike."""
    answered = 0
    for name in ("clock", "weather", "zzz", "qqq", "add", "tell", "x", "go"):  # the random model calls some of them
        function = {"name": name, "parameters": NOTHING}
        form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
        chat = chat_body(tools=[{"type": "function", "function": function}], response_format=form, max_tokens=60)
        asked = {
            "model": MODEL,
            "max_tokens": 60,
            "messages": user("Say hi."),
            "temperature": 0,
            "tools": [{"name": name, "input_schema": NOTHING}],
            "output_config": {"format": {"type": "json_schema", "schema": PERSON}},
        }
        choice = post(llama, CHAT, chat).json()["choices"][0]
        if name not in str(choice["message"]):
            assert (choice["finish_reason"], json.loads(choice["message"]["content"])) == ("stop", ANSWER)
            deltas = [chunk["choices"][0]["delta"] for chunk in documents(post(llama, CHAT, chat | {"stream": True}))]
            assert json.loads("".join(delta.get("content") or "" for delta in deltas)) == ANSWER
            assert not any("tool_calls" in delta for delta in deltas)
            answered += 1
        message = post(llama, "/v1/messages", asked).json()
        if name not in str(message["content"]):
            assert json.loads(message["content"][0]["text"]) == ANSWER
            assert message["stop_reason"] == "end_turn"
            answered += 1
        asked = {
            "model": MODEL,
            "input": "Say hi.",
            "max_output_tokens": 60,
            "temperature": 0,
            "tools": [{"type": "function", **function}],
            "text": {"format": {"type": "json_schema", "name": "p", "schema": PERSON}},
        }
        output = post(llama, "/v1/responses", asked).json()["output"]
        if name not in str(output):
            assert [json.loads(item["content"][0]["text"]) for item in output] == [ANSWER]
            answered += 1
    assert answered > 2


def test_a_template_that_writes_nothing(llama: httpx.Client) -> None:
    answer = llama.post(CHAT, json=chat_body(chat_template_kwargs={"silent": True}))
    assert answer.status_code == 400
    assert "makes no text" in answer.json()["error"]["message"]


def history(**function: Any) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "now"} | function}
    return [
        *user("Hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "12"},
    ]


def test_no_arguments_in_many_ways(llama: httpx.Client) -> None:
    """The template goes through the arguments, as Qwen3-Coder's does, and refuses what is no object."""

    def prompt(**function: Any) -> str:
        body = {"model": MODEL, "messages": history(**function)}
        tokens = post(llama, "/tokenize", body).json()["tokens"]
        return str(post(llama, "/detokenize", {"model": MODEL, "tokens": tokens}).json()["prompt"])

    empty = prompt(arguments="{}")
    for nothing in (
        {},
        {"arguments": None},
        *({"arguments": text} for text in ("", " ", "\n", "null", " null ", "{ }")),
    ):
        assert prompt(**nothing) == empty
    assert "a=1;" in prompt(arguments='{"a": 1}')
    for text in ("[]", "{bad", "3", '"a"'):
        error = llama.post(CHAT, json=chat_body(messages=history(arguments=text)))
        assert (error.status_code, error.json()["error"]["param"]) == (
            400,
            "messages[1].tool_calls[0].function.arguments",
        )
        assert "no JSON object" in error.json()["error"]["message"]
    item = {"type": "function_call", "call_id": "a", "name": "now"}
    for nothing in ({}, {"arguments": ""}):
        asked = {"model": MODEL, "input": [{"role": "user", "content": "Hi"}, item | nothing], "max_output_tokens": 1}
        post(llama, "/v1/responses", asked)
    for block in ({"input": {}}, {"input": None}, {"input": ""}):
        used = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "now"} | block]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "12"}]}
        post(llama, "/v1/messages", {"model": MODEL, "max_tokens": 1, "messages": [*user("Hi"), used, result]})


def test_thoughts_without_an_answer_go_on(llama: httpx.Client) -> None:
    for message in (
        {"content": None, "reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"content": "", "reasoning": "hm"},
    ):
        messages = [*user("Hi"), {"role": "assistant"} | message, *user("Well?")]
        post(llama, CHAT, chat_body(messages=messages))
    for message in ({"content": None}, {"content": None, "reasoning_content": None}, {"reasoning_content": ""}):
        answer = llama.post(CHAT, json=chat_body(messages=[*user("Hi"), {"role": "assistant"} | message]))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].content")
