"""The OpenAPI document describes what the server does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from server.api.openai.chat_options import ChatOptions
from server.api.routes.completions import CompletionRequest
from tests.api.conftest import chat_body


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    return dict(http.get("/openapi.json").json())


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(value) for value in node.values()), set())
    return set().union(*(references(value) for value in node)) if isinstance(node, list) else set()


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    names = references(document)
    assert names
    for reference in names:
        prefix, _, name = reference.rpartition("/")
        assert prefix == "#/components/schemas"
        assert name in document["components"]["schemas"], reference


def test_paths_and_statuses(document: dict[str, Any]) -> None:
    assert set(document["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"}
    statuses = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "401", "404", "413", "415", "429", "500", "503", "504"} == set(statuses)


def test_examples_work(document: dict[str, Any], http: httpx.Client) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert http.post(path, json=content["example"] | {"max_tokens": 1}).status_code == 200


def test_every_option_is_documented() -> None:
    text = Path("docs/api.md").read_text()
    for request in (ChatOptions, CompletionRequest):
        for name in set(request.model_fields) - {"model", "messages", "prompt"}:
            assert f"`{name}`" in text, name


def test_options_are_those_that_are_accepted(document: dict[str, Any], http: httpx.Client) -> None:
    schema = document["components"]["schemas"]["ChatOptions"]
    assert "additionalProperties" not in schema
    assert {"messages", "temperature", "stop", "n"} <= set(schema["properties"])
    unset = dict.fromkeys(set(schema["properties"]) - set(chat_body()))
    answer = http.post("/v1/chat/completions", json=chat_body(max_tokens=1, **unset))
    assert answer.status_code == 200, answer.text
