"""A tokenizer with more tokens than its model has rows, as fine-tunes leave it that added tokens and resized nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.api.conftest import MODEL, chat_body, user
from tests.clients.random_model import write_random_model
from tests.conftest import serving

pytestmark = pytest.mark.rest

ROWS = 49152
PAD, NEW = ROWS, ROWS + 1
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def http(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("added") / "model"
    config = write_random_model(folder, embedded_folder)
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.add_tokens(["[NEW]"])
    tokenizer.save_pretrained(folder)
    with serving(folder.parent, config) as client:
        yield client


@pytest.mark.parametrize("count", [1, 3])
def test_answers_keep_to_grammars(http: httpx.Client, count: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    body = chat_body(response_format=form, max_tokens=60, temperature=1.0, n=count)
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert [json.loads(choice["message"]["content"]) for choice in answer.json()["choices"]] == [{"a": 1}] * count


def test_calls_can_be_forced(http: httpx.Client) -> None:
    body = chat_body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}, max_tokens=60)
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "f"


def refused(http: httpx.Client, path: str, body: dict[str, Any], param: str, name: str) -> None:
    answer = http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert name in error["message"]
    if path != "/v1/messages":  # whose errors have a message alone
        assert (error["param"], error["code"]) == (param, "value_out_of_range")


@pytest.mark.parametrize(
    ("text", "token"), [("a [NEW] b", f"'[NEW]' is token {NEW}"), ("a [PAD]", f"'[PAD]' is token {PAD}")]
)
def test_a_text_with_such_a_token_is_refused_by_its_name(http: httpx.Client, text: str, token: str) -> None:
    refused(http, "/v1/completions", {"prompt": text, "max_tokens": 2}, "prompt", token)
    refused(http, "/v1/completions", {"prompt": ["fine", text], "max_tokens": 2}, "prompt[1]", token)
    refused(http, "/v1/completions", {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 0}, "prompt", token)
    refused(http, "/v1/embeddings", {"input": text}, "input", token)
    refused(http, "/v1/embeddings", {"input": ["fine", text]}, "input[1]", token)


def test_a_conversation_with_such_a_token_is_refused_by_its_name(http: httpx.Client) -> None:
    messages, token = user("a [NEW] b"), f"'[NEW]' is token {NEW}"
    refused(http, "/v1/chat/completions", {"messages": messages, "max_tokens": 2}, "messages", token)
    refused(http, "/v1/messages", {"messages": messages, "max_tokens": 2}, "messages", token)
    refused(http, "/v1/responses", {"input": "a [NEW] b", "max_output_tokens": 16}, "input", token)
    # Special tokens in what a user says are text.
    answer = http.post("/v1/chat/completions", json=chat_body(messages=user("a [PAD] b"), max_tokens=2))
    assert answer.status_code == 200, answer.text


def test_options_name_the_models_tokens_only(http: httpx.Client) -> None:
    for options, param in (
        ({"logit_bias": {str(NEW): 1}}, "logit_bias"),
        ({"stop_token_ids": [PAD]}, "stop_token_ids"),
    ):
        refused(http, "/v1/completions", {"prompt": "a", "max_tokens": 2, **options}, param, "49152 tokens")
    refused(http, "/v1/completions", {"prompt": [5, NEW], "max_tokens": 2}, "prompt[1]", "49152 tokens")


def test_the_tokenizers_own_endpoints_know_all_tokens(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": "a[NEW][PAD]"}).json()["tokens"]
    assert tokens[-2:] == [NEW, PAD]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "a[NEW][PAD]"
    assert http.post("/detokenize", json={"tokens": [NEW + 1]}).status_code == 400
