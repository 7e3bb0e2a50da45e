"""Ranks that die or stop: the server's streams end with errors, the engine comes back as a whole, no process is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import RunningServer, engine_pid, start_server, until_ready

RANKS = 3
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def server(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model on three ranks."""
    root = tmp_path_factory.mktemp("server")
    config = root / "config.yaml"
    config.write_text(
        f"engine: {{device: cpu, tensor_parallel_size: {RANKS}, kv_cache_bytes: 33554432, standby: false}}\n"
    )
    with start_server(root / "log", "--config", str(config)) as running:
        yield running
        until_ready(running)
        ranks = _ranks(running)
    # SIGTERM has ended the server; its ranks have ended with it.
    deadline = time.monotonic() + 60
    while any(_lives(pid) for pid in ranks):
        assert time.monotonic() < deadline, "a rank outlives the server"
        time.sleep(0.1)


def _ranks(server: RunningServer) -> list[int]:
    """Process ids of the workers, by rank."""
    engine = engine_pid(server.process.pid)
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    named = {Path(f"/proc/{child}/comm").read_text().strip(): int(child) for child in children}
    return [named[f"nf4-rank-{rank}"] for rank in range(1, RANKS)]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _ask(server: RunningServer, tokens: int) -> httpx.Response:
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": tokens, "temperature": 0}
    return httpx.post(f"{server.base_url}/v1/completions", json={**body, "ignore_eos": True}, timeout=120)


def _text(server: RunningServer) -> str:
    text: str = _ask(server, 6).json()["choices"][0]["text"]
    return text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_engine_ends_and_comes_back_as_a_whole(server: RunningServer, number: signal.Signals) -> None:
    text = _text(server)
    assert text.startswith(" Paris.")
    before = _ranks(server)
    answers: list[tuple[float, httpx.Response]] = []

    def ask() -> None:
        answer = _ask(server, 2000)
        answers.append((time.monotonic(), answer))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(2)
    os.kill(before[-1], number)
    killed = time.monotonic()
    asking.join()
    ended, answer = answers[0]
    assert ended - killed < 10
    assert answer.status_code == 500
    assert "the engine ended: rank 2 " in answer.json()["error"]["message"]
    until_ready(server)
    assert _text(server) == text
    assert set(_ranks(server)).isdisjoint(before)
    assert not any(_lives(pid) for pid in before)


@pytest.mark.rest
def test_memory_is_told_by_rank(server: RunningServer) -> None:
    assert _text(server)
    until = time.monotonic() + 60
    while not all(used := _used_memory(server)) and time.monotonic() < until:
        time.sleep(0.2)  # it is told beside steps, not in front of an answer
        _ask(server, 1)
    assert all(used), used


def _used_memory(server: RunningServer) -> list[float]:
    """By rank, as /metrics has it."""
    rows = httpx.get(f"{server.base_url}/metrics").text.splitlines()
    names = [f'rank="{rank}"' for rank in range(RANKS)]
    found = [next(row for row in rows if row.startswith("nf4_device_memory_used_") and name in row) for name in names]
    return [float(row.split()[-1]) for row in found]
