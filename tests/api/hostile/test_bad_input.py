"""Bad input of every kind gets an answer in OpenAI's error shape, and the server goes on."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.conftest import MODEL, chat_body, user
from tests.conftest import RunningServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}


def check(answer: httpx.Response, status: int, param: str | None, code: str | None) -> str:
    """The error's message, when the answer has this status and OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code), error
    assert error["message"]
    assert len(error["message"]) < 600
    return str(error["message"])


VALUES: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": -0.1}, "temperature", "value_out_of_range"),
    ({"temperature": 1e300}, "temperature", "value_out_of_range"),
    ({"top_p": 1.01}, "top_p", "value_out_of_range"),
    ({"top_k": -2}, "top_k", "value_out_of_range"),
    ({"top_k": 2**70}, "top_k", "value_out_of_range"),
    ({"min_p": 2}, "min_p", "value_out_of_range"),
    ({"seed": 2**63}, "seed", "value_out_of_range"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"presence_penalty": 3}, "presence_penalty", "value_out_of_range"),
    ({"frequency_penalty": -3}, "frequency_penalty", "value_out_of_range"),
    ({"repetition_penalty": 0}, "repetition_penalty", "value_out_of_range"),
    ({"n": 0}, "n", "value_out_of_range"),
    ({"n": 129}, "n", "value_out_of_range"),
    ({"max_tokens": 0}, "max_tokens", "value_out_of_range"),
    ({"max_tokens": -5}, "max_tokens", "value_out_of_range"),
    ({"max_tokens": 10**30}, "max_tokens", "value_out_of_range"),
    ({"max_tokens": 2_000_000}, "messages", "context_length_exceeded"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "value_out_of_range"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "invalid_value"),
    ({"min_tokens": 3}, "min_tokens", "value_out_of_range"),
    ({"min_tokens": -1}, "min_tokens", "value_out_of_range"),
    ({"logprobs": 3}, "logprobs", "invalid_type"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "value_out_of_range"),
    ({"logit_bias": {"cat": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"9" * 400: 1}}, "logit_bias", "value_out_of_range"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "value_out_of_range"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "array_above_max_length"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": [5]}, "stop[0]", "invalid_type"),
    ({"stop": ["x"] * 17}, "stop", "array_above_max_length"),
    ({"stop": "x" * 513}, "stop", "invalid_value"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids", "value_out_of_range"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "value_out_of_range"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"model": 5}, "model", "invalid_type"),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id", "missing_required_parameter"),
    ({"messages": [{"role": "function", "content": ""}]}, "messages[0].role", "unsupported_parameter"),
    ({"messages": [{"role": "user", "content": "", "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": ""}}]}]}, "messages[0].tool_calls", "invalid_value"),
    ({"messages": [{"role": 7, "content": ""}]}, "messages[0].role", "invalid_type"),
    ({"messages": [{"role": "assistant", "content": "", "prefix": "yes"}]}, "messages[0].prefix", "invalid_type"),
    ({"messages": user(5)}, "messages[0].content", "invalid_type"),
    ({"messages": user([])}, "messages[0].content", "empty_array"),
    ({"messages": user(["a"])}, "messages[0].content[0]", "invalid_type"),
    ({"messages": user([{"type": "image_url"}])}, "messages[0].content[0].type", "unsupported_parameter"),
    ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text", "invalid_type"),
    ({"messages": user([{"text": "a"}])}, "messages[0].content[0].type", "invalid_value"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}, "messages[0].tool_calls[0]",
     "invalid_value"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "invalid_value"),
    ({"chat_template_kwargs": {"tokenize": True}}, "messages", "invalid_prompt"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "f"}, "tool_choice", "invalid_value"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}],
      "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "invalid_value"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}},
     "response_format.json_schema.schema", "invalid_grammar"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
     "response_format.json_schema.schema", "invalid_grammar"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs.structural_tag",
     "unsupported_parameter"),
    ({"structured_outputs": {"grammar": "start: /a/ start"}, "max_tokens": 12}, "structured_outputs.grammar",
     "invalid_grammar"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "invalid_grammar"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "invalid_grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty_array"),
    ({"structured_outputs": {"grammar": "((("}}, "structured_outputs.grammar", "invalid_grammar"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex", "invalid_value"),
    ({"structured_outputs": {"grammar": "x" * 300_000}}, "structured_outputs.grammar", "invalid_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
    ({"guided_json": 5}, "guided_json", "invalid_grammar"),
    ({"reasoning_effort": "much"}, "reasoning_effort", "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "code"), VALUES, ids=[json.dumps(v[0])[:60] for v in VALUES])
def test_chat_values(http: httpx.Client, change: dict[str, Any], param: str, code: str) -> None:
    message = check(http.post(CHAT, json=chat_body(**change)), 400, param, code)
    assert param in message or code in ("context_length_exceeded", "invalid_prompt", "value_out_of_range")


TEXT_VALUES: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "invalid_type"),
    ({"prompt": 5}, "prompt", "invalid_type"),
    ({"prompt": ""}, "prompt", "empty_prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty_prompt"),
    ({"prompt": []}, "prompt", "empty_array"),
    ({"prompt": [[]]}, "prompt[0]", "empty_array"),
    ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
    ({"prompt": [1, True]}, "prompt[1]", "invalid_type"),
    ({"prompt": [True]}, "prompt[0]", "invalid_type"),
    ({"prompt": [-1]}, "prompt[0]", "value_out_of_range"),
    ({"prompt": [10**30]}, "prompt[0]", "value_out_of_range"),
    ({"prompt": [[1], [49152]]}, "prompt[1][0]", "value_out_of_range"),
    ({"prompt": ["a"] * 300}, "prompt", "value_out_of_range"),
    ({"prompt": "a " * 20_000}, "prompt", "context_length_exceeded"),
    ({"prompt": [5] * 8192}, "prompt", "context_length_exceeded"),
    ({"max_tokens": 8192}, "prompt", "context_length_exceeded"),
    ({"max_tokens": 0}, "max_tokens", "value_out_of_range"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "value_out_of_range"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"logprobs": 21}, "logprobs", "value_out_of_range"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"messages": user("a")}, "messages", "unsupported_parameter"),
]


@pytest.mark.parametrize(("change", "param", "code"), TEXT_VALUES, ids=[json.dumps(v[0])[:60] for v in TEXT_VALUES])
def test_completion_values(http: httpx.Client, change: dict[str, Any], param: str, code: str) -> None:
    check(http.post(TEXT, json={"model": MODEL, "prompt": "a", "max_tokens": 1} | change), 400, param, code)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_missing_fields(http: httpx.Client, path: str) -> None:
    check(http.post(path, json={}), 400, "model", "missing_required_parameter")
    field = "messages" if path == CHAT else "prompt"
    check(http.post(path, json={"model": MODEL}), 400, field, "missing_required_parameter")
    check(http.post(path, json={"model": "x" * 300, field: ["a"]}), 404, "model", "model_not_found")


BODIES = [
    b"",
    b"{",
    b'{"model": }',
    b'{"model": "x"} trailing',
    b'{"model": "\xff"}',
    b'{"model": "\\ud800"}',
    b'{"model": "\xed\xa0\x80"}',
    b'{"\\udfff": 1}',
    b'{"temperature": NaN, "model": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b"\x00" * 1000,
    b"model=x&prompt=y",
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("body", BODIES, ids=[str(body[:24]) for body in BODIES])
def test_malformed_json(http: httpx.Client, path: str, body: bytes) -> None:
    check(http.post(path, content=body, headers=JSON), 400, None, "invalid_json")


@pytest.mark.parametrize("body", [b"[]", b"null", b"5", b'"text"', b"true"])
def test_json_that_is_no_object(http: httpx.Client, body: bytes) -> None:
    check(http.post(CHAT, content=body, headers=JSON), 400, None, "invalid_type")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(http: httpx.Client, value: str) -> None:
    body = json.dumps(chat_body()).replace('"temperature": 0', f'"temperature": {value}')
    answer = http.post(CHAT, content=body, headers=JSON)
    assert answer.json()["error"]["param"] == "temperature"
    assert answer.status_code == 400


def test_nul_and_odd_characters_are_text(http: httpx.Client) -> None:
    for text in ("\x00", "a\x00b", "\ufffe\uffff", "\u202e\u0007", "<|im_end|>", "\U0010ffff"):
        assert http.post(CHAT, json=chat_body(messages=user(text), max_tokens=1)).status_code == 200


def test_content_type(http: httpx.Client) -> None:
    body = json.dumps(chat_body())
    check(http.post(CHAT, content=body, headers={"content-type": "text/plain"}), 415, None, "unsupported_media_type")
    check(http.post(CHAT, content=body), 415, None, "unsupported_media_type")
    accepted = {"content-type": "application/json; charset=utf-8"}
    assert http.post(CHAT, content=json.dumps(chat_body(max_tokens=1)), headers=accepted).status_code == 200


def test_body_over_the_limit(http: httpx.Client) -> None:
    check(http.post(CHAT, content=b" " * (4 * 2**20 + 1), headers=JSON), 413, None, "request_too_large")


def test_body_over_the_limit_in_chunks_of_unknown_number(http: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 2**16

    check(http.post(CHAT, content=chunks(), headers=JSON), 413, None, "request_too_large")


def test_announced_size_over_the_limit_is_answered_before_it_is_sent(server: RunningServer) -> None:
    host, port = server.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {10**12}\r\n\r\n{{".encode()
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_many_messages(http: httpx.Client) -> None:
    body = chat_body(messages=user("a") * 40_000)
    check(http.post(CHAT, json=body), 400, "messages", "context_length_exceeded")


def test_routing(http: httpx.Client) -> None:
    check(http.get("/nowhere"), 404, None, "unknown_url")
    check(http.get("/" + "x" * 5000), 404, None, "unknown_url")
    answer = http.get(CHAT)
    check(answer, 405, None, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    answer = http.post("/health")
    check(answer, 405, None, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD"
    assert http.put("/ping").headers["allow"] == "GET, HEAD, POST"


def test_bodies_that_are_packed_or_begin_with_a_mark(http: httpx.Client) -> None:
    body = json.dumps(chat_body(max_tokens=1)).encode()
    packed = http.post(CHAT, content=gzip.compress(body), headers=JSON | {"content-encoding": "gzip"})
    assert "gzip" in check(packed, 415, None, "unsupported_content_encoding")
    assert packed.headers["accept-encoding"] == "identity"
    plain = http.post(CHAT, content=body, headers=JSON | {"content-encoding": "identity"})
    assert plain.status_code == 200
    marked = http.post(CHAT, content=b"\xef\xbb\xbf" + body, headers=JSON)
    assert marked.status_code == 200
