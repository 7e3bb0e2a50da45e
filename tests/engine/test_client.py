"""The client and the engine process together: a real process, the embedded model, nothing of ours replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from server.config import Config, EngineConfig
from server.engine.supervisor.client import EngineClient, EngineStatus, EngineUnavailableError
from server.types import RequestOutput, StepOutputs, TokenLogprob
from tests.engine.factories import make_request

START_S = 120
_SESSIONS_COUNT = Path("/proc/self/autogroup").exists()


@asynccontextmanager
async def running(folder: Path, **engine: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(Config(engine=EngineConfig(**{"enforce_eager": True, "standby": False, **engine})), folder)
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


async def collect(client: EngineClient, prompt: list[int] | int, **sampling: Any) -> list[RequestOutput]:
    return [output async for output in client.generate(make_request(prompt, **sampling))]


async def until(condition: Any, timeout_s: float = 90) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the conditions are of another process
            await asyncio.sleep(0.01)


async def test_a_life_with_an_engine(embedded_folder: Path) -> None:
    """One engine for all of it: a start takes seconds."""
    async with running(embedded_folder) as client:
        seen: list[EngineStatus] = []
        client.add_status_listener(seen.append)
        assert client.status.state == "loading"
        with pytest.raises(EngineUnavailableError, match="loading"):
            await collect(client, 5)
        ready = await asyncio.wait_for(client.wait_ready(), START_S)
        assert any(s.state == "loading" and s.stage for s in seen)
        assert (client.status.state, client.status.ready) == ("ready", ready)
        assert ready.max_model_len == 8192
        await _answers(client, embedded_folder)
        await _falls_behind(client)
        await _leaves_early(client)
        await _bad_requests(client)
    assert client.status.state == "stopped"


async def _answers(client: EngineClient, folder: Path) -> None:
    steps: list[StepOutputs] = []
    client.add_step_listener(steps.append)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    outputs = await collect(client, list(prompt), max_tokens=10)
    assert "Paris" in tokenizer.decode([t for o in outputs for t in o.new_token_ids])
    assert [o.finish_reason for o in outputs] == [None] * (len(outputs) - 1) + ["length"]
    assert sum(len(o.new_token_ids) for o in outputs) == len(steps) == 10
    assert client.num_requests == 0


async def _falls_behind(client: EngineClient) -> None:
    """Outputs that have come meanwhile come at once, but for an end that is none of the model's."""
    stream = client.generate(make_request(40, max_tokens=12, ignore_eos=True))
    first = await anext(stream)
    await until(lambda: client.stats.running == 0)
    (rest,) = [output async for output in stream]
    assert len(first.new_token_ids + rest.new_token_ids) == 12
    assert rest.finish_reason == "length"
    steps: list[StepOutputs] = []
    client.add_step_listener(steps.append)
    stream = client.generate(make_request(40, request_id="slow", max_tokens=4000, ignore_eos=True))
    await anext(stream)
    begun = len(steps)
    await until(lambda: len(steps) > begun + 3)
    await client.abort(["slow"])
    tokens, end = [output async for output in stream]
    assert len(tokens.new_token_ids) > 3
    assert tokens.finish_reason is None
    assert (end.finish_reason, end.new_token_ids) == ("abort", [])
    await until(lambda: client.stats.kv_blocks_used == 0)


def test_outputs_are_joined() -> None:
    score = TokenLogprob(5, -0.5)
    first = RequestOutput("a", [1], num_cached_tokens=16, logprobs=[score], prompt_logprobs=[score])
    later = RequestOutput("a", [2, 3], "stop", 3, num_cached_tokens=16, logprobs=[score, score])
    joined = first.followed_by(later)
    assert joined == RequestOutput("a", [1, 2, 3], "stop", 3, None, 16, [score] * 3, [score])
    plain = RequestOutput("a", [1]).followed_by(RequestOutput("a", [2]))
    assert plain == RequestOutput("a", [1, 2])


async def _leaves_early(client: EngineClient) -> None:
    stream = client.generate(make_request(40, max_tokens=4000, ignore_eos=True))
    await anext(stream)
    assert client.stats.kv_blocks_used > 0
    await stream.aclose()
    await until(lambda: client.stats.kv_blocks_used == 0)
    reader = asyncio.create_task(collect(client, 40, max_tokens=4000, ignore_eos=True))
    await until(lambda: client.stats.kv_blocks_used > 0)
    reader.cancel()
    await until(lambda: client.stats.kv_blocks_used == 0)
    asked = asyncio.create_task(collect(client, 40, request_id="mine", max_tokens=4000, ignore_eos=True))
    await until(lambda: client.stats.kv_blocks_used > 0)
    await client.abort(["mine", "unknown"])
    assert (await asked)[-1].finish_reason == "abort"
    await until(lambda: client.stats.kv_blocks_used == 0)


async def _bad_requests(client: EngineClient) -> None:
    bad, good = await asyncio.gather(collect(client, [10**6]), collect(client, 5, ignore_eos=True))
    assert (bad[-1].finish_reason, bad[-1].error) == (
        "error",
        "the prompt has token ids outside the vocabulary of 49152",
    )
    assert good[-1].finish_reason == "length"


@pytest.mark.slow
async def test_the_process_that_stands_by_becomes_the_engine(embedded_folder: Path) -> None:
    async with running(embedded_folder, standby=True) as client:
        await asyncio.wait_for(client.wait_ready(), START_S)
        first = client.pid
        assert first is not None
        assert _name(first) == "nf4-engine"
        await until(lambda: _standby() is not None, START_S)
        second = _standby()
        assert second is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: client.status.state == "restarting")
        await asyncio.wait_for(client.wait_ready(), START_S)
        assert client.pid == second
        assert _name(second) == "nf4-engine"
        assert _session_niceness(second) == 0
        assert (await collect(client, 5))[-1].finish_reason in ("stop", "length")
        # One that dies while it waits is missed by nobody.
        await until(lambda: _standby() not in (None, second), START_S)
        third = _standby()
        assert third is not None
        os.kill(third, signal.SIGKILL)
        await until(lambda: not _is_alive(third))
        os.kill(second, signal.SIGKILL)
        await until(lambda: client.status.state == "restarting")
        await asyncio.wait_for(client.wait_ready(), START_S)
        assert client.pid not in (first, second, third)
        await until(lambda: _standby() is not None, START_S)
    assert not _children()


@pytest.mark.slow
async def test_an_engine_that_dies_early_is_started_afresh(embedded_folder: Path) -> None:
    """The process that still imports is not waited for: it yields to everything else."""
    async with running(embedded_folder, standby=True) as client:
        await asyncio.wait_for(client.wait_ready(), START_S)
        first = client.pid
        assert first is not None
        await until(lambda: _child("nf4-imports") is not None, START_S)
        importing = _child("nf4-imports")
        await until(lambda: _session_niceness(importing) == (19 if _SESSIONS_COUNT else 0))
        os.kill(first, signal.SIGKILL)
        await until(lambda: client.status.state == "restarting")
        await asyncio.wait_for(client.wait_ready(), START_S)
        assert client.pid not in (first, importing)
        assert [_name(pid) for pid in _children()] == ["nf4-engine"]


def _children() -> list[int]:
    """This process's own that are alive."""
    tasks = Path("/proc/self/task").iterdir()
    pids = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return [pid for pid in pids if _is_alive(pid) and _name(pid).startswith("nf4-")]


def _standby() -> int | None:
    return _child("nf4-standby")


def _session_niceness(pid: int | None) -> int:
    """The niceness with which Linux divides time among sessions; 0 where it does not."""
    return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1]) if _SESSIONS_COUNT else 0


def _child(name: str) -> int | None:
    return next((pid for pid in _children() if _name(pid) == name), None)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


@pytest.mark.rest
async def test_a_damaged_checkpoint_is_fatal(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    async with running(tmp_path) as client:
        with pytest.raises(EngineUnavailableError, match=str(tmp_path)):
            await asyncio.wait_for(client.wait_ready(), START_S)
        assert client.status.state == "failed"
        assert client.restarts == 0
        assert client.pid is None


@pytest.mark.rest
async def test_an_engine_that_takes_too_long_to_start_is_given_up(embedded_folder: Path) -> None:
    async with running(embedded_folder, start_timeout_s=0.2) as client:
        with pytest.raises(EngineUnavailableError, match=r"not ready after 0\.2 s \(start_timeout_s\)"):
            await asyncio.wait_for(client.wait_ready(), 10)
        assert client.restarts == 0


@pytest.mark.rest
@pytest.mark.parametrize("standby", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_engine_ends_when_the_api_process_dies(embedded_folder: Path, standby: bool) -> None:
    count = 1 + standby
    code = f"""
import asyncio, os, signal
from pathlib import Path
from server.config import Config, EngineConfig
from server.engine.supervisor.client import EngineClient
async def main():
    config = Config(engine=EngineConfig(enforce_eager=True, standby={standby}))
    client = EngineClient(config, Path({str(embedded_folder)!r}))
    await client.start()
    await client.wait_ready()
    children = Path(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children")
    while len(children.read_text().split()) < {count}:  # the one that stands by comes when nothing has run for a while
        await asyncio.sleep(0.1)
    print(children.read_text(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False, timeout=120)
    children = [int(pid) for pid in parent.stdout.split()]
    assert len(children) == count
    deadline = 90.0
    while any(map(_is_alive, children)) and deadline > 0:
        deadline -= 0.1
        signal.sigtimedwait([], 0.1)
    assert not any(map(_is_alive, children))


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
