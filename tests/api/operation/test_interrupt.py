"""Ctrl-C: SIGINT to all processes of a server's group, as a terminal sends it, at every moment of its life."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from bench.processes import free_port, is_ready
from tests.api.conftest import chat_body, user
from tests.conftest import QUICK_START, engine_pid

pytestmark = pytest.mark.rest

STORY = chat_body(stream=True, messages=user("Tell me a story."), max_tokens=60, ignore_eos=True)


@dataclass
class Interrupted:
    """A server in a session of its own. Its processes besides the first one have further sessions."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a moment of the server's life."""
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.005)

    def has_loaded(self, library: str) -> bool:
        """Whether the first process has imported a compiled module."""
        return library in Path(f"/proc/{self.process.pid}/maps").read_text()

    def engine(self) -> int | None:
        """Process id of the engine, once it has begun."""
        with suppress(StopIteration, FileNotFoundError):
            return engine_pid(self.process.pid)
        return None


@contextmanager
def running(folder: Path, **environment: str) -> Iterator[Interrupted]:
    """A server that starts, on a free port."""
    log, port = folder / "log", free_port()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "server", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **QUICK_START, **environment},
            start_new_session=True,
        )
    try:
        yield Interrupted(process, f"http://127.0.0.1:{port}", log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def server(embedded_folder: Path, tmp_path: Path) -> Iterator[Interrupted]:
    """A server that is ready."""
    with running(tmp_path) as server:
        server.until(lambda: is_ready(f"{server.url}/health"))
        yield server


def test_a_running_stream_ends_whole(server: Interrupted) -> None:
    engine = server.engine()
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=STORY, timeout=60) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        server.interrupt()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert sum('"content":' in line for line in [first, *rest]) > 30
    assert server.process.wait(60) == 0
    assert not Path(f"/proc/{engine}").exists()
    assert "Traceback" not in server.log.read_text()


def test_a_second_one_ends_everything_at_once(server: Interrupted) -> None:
    engine = server.engine()
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=STORY | {"max_tokens": 4000}) as answer:
        next(answer.iter_lines())
        server.interrupt()
        server.until(lambda: "shutting down" in server.log.read_text())
        server.interrupt()
        assert server.process.wait(60) == 128 + signal.SIGINT
    deadline = time.monotonic() + 60
    while Path(f"/proc/{engine}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "Traceback" not in server.log.read_text()


MOMENTS: dict[str, Callable[[Interrupted], bool]] = {
    "the first imports": lambda server: server.has_loaded("pydantic_core"),
    "the last imports": lambda server: server.has_loaded("uvloop"),
    "the first stage": lambda server: "/6 " in server.log.read_text(),
    "the engine's imports": lambda server: server.engine() is not None,
    "the model's loading": lambda server: "loading" in server.log.read_text(),
}


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_start_ends_without_a_traceback(moment: str, processes: str, embedded_folder: Path, tmp_path: Path) -> None:
    with running(tmp_path, NF4_HTTP__API_PROCESSES=processes) as server:
        server.until(lambda: MOMENTS[moment](server))
        server.interrupt()
        code = server.process.wait(60)
    said = server.log.read_text()
    # Ended by the signal during imports; in order once it listens, which it may do by the time that the signal is there.
    during_imports = "imports" in moment and "engine" not in moment
    assert code in ((-signal.SIGINT, 0) if during_imports else (0,)), said
    assert "Traceback" not in said
    assert "KeyboardInterrupt" not in said


def test_a_download_ends_without_a_word(tmp_path: Path) -> None:
    """pip gets SIGINT, too, and its end is no failure of the start."""
    pip = tmp_path / "pip"
    pip.mkdir()
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text("import time\nprint('pip begins', flush=True)\ntime.sleep(60)\n")
    environment = {"PYTHONPATH": str(tmp_path), "NF4_CACHE_DIR": str(tmp_path / "cache")}
    with running(tmp_path, **environment) as server:
        server.until(lambda: "pip begins" in server.log.read_text())
        server.interrupt()
        assert server.process.wait(60) == 0
    said = server.log.read_text()
    assert said.splitlines()[-1].endswith("running requests have 30 s")
    assert "Traceback" not in said


def test_other_processes_leave_sigint_to_the_first(server: Interrupted) -> None:
    """A service manager may signal all processes of a service."""
    engine = server.engine()
    assert engine is not None
    os.kill(engine, signal.SIGINT)
    body = chat_body(max_tokens=3)
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    assert server.engine() == engine
