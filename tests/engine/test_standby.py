"""When a process is started that stands by, and when it is of use; a short program is in the place of the imports."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from server.config import Config
from server.engine.supervisor import standby
from server.engine.supervisor.child import Child
from server.engine.supervisor.standby import Standby

LIMIT_S = 60


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "IDLE_S", 0.3)
    monkeypatch.setattr(standby, "POLL_S", 0.02)


class _Started(NamedTuple):
    child: Child
    process: subprocess.Popen[bytes]


class Imports:
    """Starts a process that says that it has imported everything, or never says it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, end: bool = True) -> None:
        self.started: list[_Started] = []
        self._end = end
        monkeypatch.setattr(standby, "start_child", self._start)

    def _start(self, _config: Config, *, tells_imported: int) -> Child:
        tell = f"os.write({tells_imported}, b'.'); os.close({tells_imported}); " if self._end else ""
        process = subprocess.Popen(
            [sys.executable, "-c", f"import os, sys; {tell}print(flush=True); sys.stdin.read()"],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.PIPE,
            pass_fds=[tells_imported],
        )
        self.started.append(_Started(Child(process), process))
        return self.started[-1].child

    async def begun(self, count: int = 1) -> Child:
        """The process with this number, from 1 on, once it has said what it says."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.started) < count:  # noqa: ASYNC110 - a task of the standby's appends to it
                await asyncio.sleep(0.01)
            started = self.started[count - 1]
            assert started.process.stdout is not None
            with started.process.stdout as output:
                await asyncio.to_thread(output.readline)
        return started.child


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Imports:
    return Imports(monkeypatch)


def prepared(device: str = "cpu") -> Standby:
    """The one of a server that is idle."""
    waiting = Standby(Config(), lambda: False)
    waiting.prepare(device)
    return waiting


async def test_it_starts_when_nothing_has_run_for_a_while(imports: Imports) -> None:
    busy, last_busy = True, 0.0

    def is_busy() -> bool:
        nonlocal last_busy
        last_busy = time.monotonic() if busy else last_busy
        return busy

    waiting = Standby(Config(), is_busy)
    waiting.prepare("cpu")
    await asyncio.sleep(0.6)
    assert not imports.started
    busy = False
    await imports.begun()
    assert time.monotonic() - last_busy >= 0.3
    waiting.prepare("cpu")
    await asyncio.sleep(0.5)
    assert len(imports.started) == 1, "one is enough"
    await waiting.end()
    assert imports.started[0].child.returncode is not None


async def test_a_server_that_is_never_idle_gets_one_at_last(imports: Imports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "PATIENCE_S", 0.6)
    waiting = Standby(Config(), lambda: True)
    begun = time.monotonic()
    waiting.prepare("cpu")
    await imports.begun()
    assert time.monotonic() - begun >= 0.6
    await waiting.end()


async def test_it_is_taken_when_it_has_imported_everything(imports: Imports) -> None:
    waiting = prepared()
    child = await imports.begun()
    assert await waiting.take() is child
    assert child.returncode is None
    assert await waiting.take() is None
    child.kill()
    await child.wait()
    child.close_input()


async def test_one_that_still_imports_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = Imports(monkeypatch, end=False)
    before = _descriptors()
    waiting = prepared()
    child = await imports.begun()
    assert await waiting.take() is None
    assert child.returncode is not None
    assert _descriptors() == before


async def test_one_that_has_not_begun_is_not_begun(imports: Imports) -> None:
    waiting = prepared()
    assert await waiting.take() is None
    await asyncio.sleep(0.6)
    assert not imports.started


async def test_one_that_died_is_replaced(imports: Imports) -> None:
    before = _descriptors()
    waiting = prepared()
    child = await imports.begun()
    child.kill()
    await child.wait()
    waiting.prepare("cpu")
    second = await imports.begun(2)
    await waiting.end()
    assert second.returncode is not None
    assert _descriptors() == before


async def test_none_on_a_gpu_unless_it_is_asked_for(imports: Imports) -> None:
    waiting = prepared("cuda")
    await asyncio.sleep(0.5)
    assert not imports.started
    await waiting.end()


def _descriptors() -> int:
    """Number of ends of pipes that this process has open."""
    return sum(_is_pipe(name) for name in os.listdir("/proc/self/fd"))


def _is_pipe(name: str) -> bool:
    try:
        return str(Path(f"/proc/self/fd/{name}").readlink()).startswith("pipe:")
    except OSError:
        return False
