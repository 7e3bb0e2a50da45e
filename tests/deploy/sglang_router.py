"""SGLang's router, cache-aware, over two of our servers; `make test-routers` installs it and runs this."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.processes import free_port
from tests.api.conftest import MODEL, chat_body, metric, user
from tests.conftest import RunningServer, start_server

assert importlib.util.find_spec("sglang_router"), "pip install sglang-router"

CHAT = "/v1/chat/completions"
QUESTIONS = 5


@pytest.fixture(scope="module")
def servers(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    assert embedded_folder
    logs = tmp_path_factory.mktemp("servers")
    with contextlib.ExitStack() as stack:
        arguments = ("--kv-cache-bytes", str(1 << 28), "--threads", "1")
        yield [stack.enter_context(start_server(logs / str(i), *arguments, eager=False)) for i in range(2)]


@pytest.fixture(scope="module")
def router(servers: list[RunningServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", "cache_aware", "--worker-urls"]
    log = tmp_path_factory.mktemp("router") / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *(each.base_url for each in servers)], stdout=output, stderr=output)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
        try:
            deadline = time.monotonic() + 120
            while MODEL not in _models(client):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.5)
            yield client
        finally:
            process.terminate()
            process.wait(30)


def _models(client: httpx.Client) -> str:
    try:
        return client.get("/v1/models").text
    except httpx.TransportError:
        return ""


def test_answers_and_streams(router: httpx.Client) -> None:
    answer = router.post(CHAT, json=chat_body(max_tokens=4)).json()
    assert answer["usage"]["completion_tokens"] == 4
    with router.stream("POST", CHAT, json=chat_body(max_tokens=4, stream=True)) as streamed:
        lines = [line for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines[:-1])
    assert text == answer["choices"][0]["message"]["content"]
    completion = router.post("/v1/completions", json={"model": MODEL, "prompt": "One, two,", "max_tokens": 3})
    assert completion.json()["usage"]["completion_tokens"] == 3


def test_errors_come_through(router: httpx.Client) -> None:
    refused = router.post(CHAT, json=chat_body(messages=user("too long " * 20_000)))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_it_sees_the_load(router: httpx.Client, servers: list[RunningServer]) -> None:
    workers: list[dict[str, Any]] = router.get("/get_loads").json()["workers"]
    assert {worker["worker"] for worker in workers} == {server.base_url for server in servers}
    assert all(worker["load"] >= 0 for worker in workers)


def test_shared_beginnings_meet_their_cache(router: httpx.Client, servers: list[RunningServer]) -> None:
    """All questions about one text but the first find it in the cache, wherever they are asked."""
    texts = ["".join(random.choices(string.ascii_lowercase + " ", k=800)) for _ in range(4)]
    clients = [httpx.Client(base_url=server.base_url, trust_env=False) for server in servers]
    before = [metric(client, "nf4_prompt_tokens_cached_total") for client in clients]
    lengths = []
    for i in range(QUESTIONS):
        for text in random.sample(texts, len(texts)):
            answer = router.post(CHAT, json=chat_body(messages=user(f"{text} Question {i}?")))
            lengths.append(answer.json()["usage"]["prompt_tokens"])
    gained = [
        metric(client, "nf4_prompt_tokens_cached_total") - old for client, old in zip(clients, before, strict=True)
    ]
    assert sum(gained) > 0.85 * sum(lengths) * (QUESTIONS - 1) / QUESTIONS
