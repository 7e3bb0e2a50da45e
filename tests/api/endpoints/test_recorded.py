"""Requests of coding agents and SDKs on their defaults, recorded from the real clients, get an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

RECORDED = Path(__file__).parents[2] / "clients" / "recorded"
REQUESTS = [
    (client, i, request)
    for path in sorted(RECORDED.glob("*.json"))
    for client, requests in [(path.stem, json.loads(path.read_text())["requests"])]
    for i, request in enumerate(requests)
]
IGNORED = {
    "claude-code": {
        "context_management", "messages[].content[].cache_control", "metadata", "output_config.effort",
        "system[].billing_header", "system[].cache_control", "thinking",
    },
    "codex": {
        "client_metadata", "include", "prompt_cache_key", "reasoning.summary", "tools[].namespace", "tools[].web_search",
    },
    "vercel-ai-sdk": {"tools[].eager_input_streaming"},
    "openai-node": {"store", "metadata"},
    "open-webui": {
        "keep_alive", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "reasoning_effort", "use_mlock",
        "use_mmap",
    },
}  # fmt: skip


def brief(request: dict[str, Any]) -> dict[str, Any]:
    """The body with a limit of eight tokens where the endpoint does not cut long limits itself."""
    body = dict(request["body"])
    if request["path"] == "/v1/responses":
        return body | {"max_output_tokens": 16}
    if request["path"].startswith("/v1/messages"):
        # 32000 tokens are asked for: a stop sequence that comes at once ends the answer.
        return body | {"stop_sequences": list("aeiou tnsr")}
    limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    return body | {limit: 8}


@pytest.mark.parametrize(
    ("client", "request_"), [(c, r) for c, _, r in REQUESTS], ids=[f"{c} {i}" for c, i, _ in REQUESTS]
)
def test_recorded_request(long_context: httpx.Client, client: str, request_: dict[str, Any]) -> None:
    if request_["body"] is None:
        assert long_context.request(request_["method"], request_["path"]).status_code == 200
        return
    answer = long_context.post(request_["path"], json=brief(request_), headers=request_["headers"])
    assert answer.status_code == 200, answer.text
    names = {name for name in answer.headers.get("x-ignored-options", "").split(", ") if name}
    assert names <= IGNORED.get(client, set())
    if request_["body"].get("stream"):
        kinds = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
        ends = ("message_stop", "response.completed", "response.incomplete")
        assert kinds[-1] in ends if kinds else answer.text.endswith("data: [DONE]\n\n")


def test_recordings_are_of_every_client_and_tell_nothing_about_who_made_them() -> None:
    assert {path.stem for path in RECORDED.glob("*.json")} == {
        "claude-code", "codex", "huggingface-hub", "langchain-js", "open-webui", "openai-agents", "openai-node",
        "vercel-ai-sdk",
    }  # fmt: skip
    for path in RECORDED.glob("*.json"):
        requests = json.loads(path.read_text())["requests"]
        assert all(request["headers"].get("x-api-key", "none") == "none" for request in requests)
        assert "authorization" not in path.read_text().lower()
