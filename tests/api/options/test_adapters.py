"""LoRA adapters over HTTP: chosen by model name, listed, loaded and unloaded while streams run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import ALL_PROJECTIONS, save_adapter
from tests.api.conftest import MODEL, chat_body, user
from tests.conftest import RunningServer, engine_pid, start_server
from tests.prompts import CHATS
from tests.reference import Reference

pytestmark = pytest.mark.rest

FIXED = "fixed"


@pytest.fixture(scope="module")
def adapters(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of two adapters of the embedded model."""
    folder = tmp_path_factory.mktemp("adapters")
    model = reference.model
    save_adapter(model, folder / "one", 1, 0.03, r=16, lora_alpha=16, target_modules=ALL_PROJECTIONS)
    save_adapter(model, folder / "two", 2, 0.03, r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    return folder


@pytest.fixture(scope="module")
def server(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with one configured adapter that may load two more."""
    folder = tmp_path_factory.mktemp("server")
    engine: dict[str, Any] = {
        "lora_modules": [{"name": FIXED, "path": str(adapters / "one")}],
        "allow_runtime_lora": True,
        "max_loras": 2,
    }
    with start_server(folder / "log", config={"engine": engine}) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_else_loaded(http: httpx.Client) -> None:
    for model in models(http):
        if model not in (MODEL, FIXED):
            unload(http, model)


def load(http: httpx.Client, name: str, path: Path | str, **options: Any) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **options})


def unload(http: httpx.Client, name: str) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def models(http: httpx.Client) -> dict[str, dict[str, Any]]:
    return {model["id"]: model for model in http.get("/v1/models").json()["data"]}


def answer(http: httpx.Client, model: str, index: int = 0) -> str:
    body = chat_body(model=model, messages=CHATS[index], max_tokens=12)
    document = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert document["model"] == model
    return str(document["choices"][0]["message"]["content"])


def test_models_say_whose_adapters_they_are(http: httpx.Client, adapters: Path) -> None:
    assert load(http, "two", adapters / "two").status_code == 200
    listed = models(http)
    assert list(listed) == [MODEL, FIXED, "two"]
    assert (listed[MODEL]["root"], listed[MODEL]["parent"]) == (MODEL, None)
    assert (listed["two"]["root"], listed["two"]["parent"]) == (str(adapters / "two"), MODEL)
    assert http.get("/v1/models/two").json() == listed["two"]


def test_every_endpoint_takes_an_adapters_name(http: httpx.Client) -> None:
    text = "Tell me a story about a fox that"
    bodies = {
        "/v1/completions": {"prompt": text, "max_tokens": 32, "temperature": 0},
        "/v1/chat/completions": {"messages": user(text), "max_tokens": 32, "temperature": 0},
        "/v1/responses": {"input": text, "max_output_tokens": 32, "temperature": 0},
        "/v1/messages": {"messages": user(text), "max_tokens": 32, "temperature": 0},
    }
    for path, body in bodies.items():
        answers = [http.post(path, json={"model": model} | body).raise_for_status().json() for model in (MODEL, FIXED)]
        assert [document["model"] for document in answers] == [MODEL, FIXED]
        parts = [document.get("choices") or document.get("output") or document["content"] for document in answers]
        for part in parts:
            part[0].pop("id", None)
        assert parts[0] != parts[1], path
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        assert http.post(path, json={"model": FIXED, "messages": user(text)}).status_code == 200
    assert http.post("/v1/completions", json={"model": "nobody", "prompt": text}).status_code == 404


def test_load_and_unload_while_a_stream_runs(http: httpx.Client, adapters: Path) -> None:
    base, fixed = answer(http, MODEL), answer(http, FIXED)
    body = chat_body(model="two", messages=CHATS[0], max_tokens=80, stream=True, ignore_eos=True)
    assert load(http, "two", adapters / "two").text == "Success: LoRA adapter 'two' added successfully."
    alone = answer(http, "two")
    assert len({base, fixed, alone}) == 3
    with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        events = [next(lines)]
        assert unload(http, "two").text == "Success: LoRA adapter 'two' removed successfully."
        assert http.post("/v1/chat/completions", json=body).status_code == 404
        full = load(http, "again", adapters / "two")  # its slot is still used
        assert full.status_code == 400
        assert "max_loras (2)" in full.json()["error"]["message"]
        events += lines
    chunks = [json.loads(event[6:]) for event in events[:-1]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text.startswith(alone)
    assert load(http, "again", adapters / "two").status_code == 200
    assert (answer(http, "again"), answer(http, MODEL), answer(http, FIXED)) == (alone, base, fixed)


def test_the_guides_lines_load_and_unload(
    http: httpx.Client, server: RunningServer, adapters: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys.txt").write_text("a key, which this server does not ask for")
    for line, loaded in zip(guide_calls(), (True, False), strict=True):
        command = line.replace("/adapters/poems", str(adapters / "two")).replace(
            "http://127.0.0.1:8000", server.base_url
        )
        subprocess.run(["sh", "-ec", command], cwd=tmp_path, check=True, capture_output=True)
        assert ("poems" in models(http)) is loaded


def guide_calls() -> list[str]:
    """The commands of docs/guide.md that load and unload an adapter."""
    guide = (Path(__file__).parents[3] / "docs" / "guide.md").read_text().replace("\\\n", " ")
    return [line for line in guide.splitlines() if line.startswith("curl") and "load_lora_adapter" in line]


def test_load_inplace_replaces(http: httpx.Client, adapters: Path) -> None:
    assert load(http, "x", adapters / "one").status_code == 200
    first = answer(http, "x")
    refused = load(http, "x", adapters / "two")
    assert refused.status_code == 400
    assert "load_inplace" in refused.json()["error"]["message"]
    assert load(http, "x", adapters / "two", load_inplace=True).status_code == 200
    assert models(http)["x"]["root"] == str(adapters / "two")
    assert first == answer(http, FIXED) != answer(http, "x")


def test_what_cannot_be_loaded(http: httpx.Client, adapters: Path, tmp_path: Path) -> None:
    missing = load(http, "x", tmp_path / "nothing")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "lora_path")
    assert load(http, "x", "a\0b").status_code == 404
    assert load(http, MODEL, adapters / "two").json()["error"]["param"] == "lora_name"
    # tests/checkpoint/test_lora_adapters.py has all that is refused.
    weights = shutil.copytree(adapters / "two", tmp_path / "files") / "adapter_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    refused = load(http, "x", weights.parent)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_adapter")
    assert "adapter_model.bin is a pickle" in refused.json()["error"]["message"]
    for document in ({"lora_name": "x"}, {"lora_path": "y"}, {}):
        assert http.post("/v1/load_lora_adapter", json=document).status_code == 400
    unknown = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "y", "lora_id": 1})
    assert (unknown.status_code, unknown.headers["X-Ignored-Options"]) == (404, "lora_id")
    assert unload(http, "nobody").status_code == 404
    assert list(models(http)) == [MODEL, FIXED]


@pytest.mark.slow
def test_adapters_survive_the_engine(http: httpx.Client, server: RunningServer, adapters: Path) -> None:
    assert load(http, "two", adapters / "two").status_code == 200
    before = answer(http, "two"), answer(http, FIXED)
    os.kill(engine_pid(server.process.pid), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while http.get("/health").json().get("engine_restarts") != 1 or http.get("/ping").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert list(models(http)) == [MODEL, FIXED, "two"]
    assert (answer(http, "two"), answer(http, FIXED)) == before
