"""Fixtures that several rooms share: the embedded model, a running server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from bench.processes import free_port, is_ready
from server.checkpoint.source import resolve_checkpoint
from server.config import EMBEDDED_MODEL, default_cache_dir
from server.objects import lasting_objects
from tests.reference import Reference

READY_TIMEOUT_S = 180.0


QUICK_START = {
    # Its imports are seconds of a core; tests/engine/test_client.py has a process that stands by.
    "NF4_ENGINE__STANDBY": "false",
    # Two files of tests run side by side, and threads of several servers on two cores wait for one another.
    "NF4_ENGINE__THREADS": "1",
    # With nothing compiled or traced, which is most of a start.
    "NF4_ENGINE__ENFORCE_EAGER": "true",
}


@dataclass(frozen=True)
class RunningServer:
    """A real server process; base_url has no trailing slash and no /v1."""

    base_url: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, **options: Any) -> httpx.Client:
        """A client with httpx's options that asks no proxy."""
        return httpx.Client(base_url=self.base_url, timeout=120, trust_env=False, **options)


_FIXTURES = {"embedded_folder", "server", "served", "debugger"}
"""Fixtures that start a server or a browser, or need the embedded model."""
_HELPERS = {
    *("start_server", "serving", "subprocess", "run_interpreted", "fusing"),
    *("load_runner", "build_runner", "make_engine", "tiny_model", "load_model", "load_shard", "load_ranks", "save_moe"),
}
"""Imports of modules whose tests start processes, compile, or compute with whole models."""
_REST = ("bench", "deploy", "ray_serve")
"""Folders whose tests only make test-all runs: of benches, of what one deploys, and of GPUs' fused launches."""


_SHARING = (
    "tests/api/endpoints/",
    "tests/api/hostile/",
    "tests/api/options/",
    "tests/api/operation/test_op",
    "tests/test_guide",
    "tests/test_parity",
)
"""Folders of files that share the servers of a session's fixtures: of these each worker of xdist would start its own."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: tests that share servers run in one worker, others in one for each file."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "servers" if nodeid.startswith(_SHARING) else str(super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from looking through modules and tests, which takes 0.3 s each time."""
    with lasting_objects():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as `process` by their fixtures and by what their modules import, and as `rest` by their folders."""
    folders = [Path(__file__).parent / name for name in _REST]
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in folders):
            item.add_marker("rest")
        if isinstance(item, pytest.Function) and not (
            _FIXTURES.isdisjoint(item.fixturenames) and _HELPERS.isdisjoint(vars(item.module))
        ):
            item.add_marker("process")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where none is; let start_server know whether the test has the mark of those that start one."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    start_server.is_marked = item.get_closest_marker("process") is not None


# The same launches in every run; the tests of measured times ask for them.
os.environ.setdefault("NF4_TUNE", "off")

# On two busy cores tiny models and GEMMs run up to a hundred times longer with two threads, which wait for one another in
# a loop: that takes the core from the servers of other tests, and theirs from these. Servers have threads of their own.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch computes with one thread again, whatever a test or an engine in this process has set."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """Folder of the embedded NF4 model (fetched and converted if `make model` has not run)."""
    return resolve_checkpoint(EMBEDDED_MODEL, default_cache_dir(), lambda stage, _: print(stage, file=sys.stderr))


@pytest.fixture(scope="session")
def reference(embedded_folder: Path) -> Reference:
    """transformers on the embedded model; what it has answered once it does not compute again."""
    return Reference(embedded_folder)


@pytest.fixture(scope="session")
def server(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server process with the embedded model on a free port, ready to answer."""
    log = tmp_path_factory.mktemp("server") / "log"
    with start_server(log, eager=False) as running:
        yield running


class start_server:  # noqa: N801 - used as a function
    """Start `python -m server` with arguments on a free port; entering waits until /health is 200.

    Set up by QUICK_START; eager: also by its last variable. The server that most tests share is not.
    loading: entering waits until the server listens, and not for the model.
    config: a file of the configuration, or what to write into one next to the log.
    environment: more variables.
    """

    is_marked = True

    def __init__(
        self,
        log: Path,
        *arguments: str,
        config: Path | dict[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        eager: bool = True,
        loading: bool = False,
    ) -> None:
        if isinstance(config, dict):
            (log.with_name("serve.yaml")).write_text(json.dumps(config))
            config = log.with_name("serve.yaml")
        self._log = log
        self._awaited = "/" if loading else "/health"
        self._arguments = arguments if config is None else ("--config", str(config), *arguments)
        self._environment = {**QUICK_START, "PYTHONUNBUFFERED": "1", **os.environ, **(environment or {})}
        if not eager:
            self._environment.pop("NF4_ENGINE__ENFORCE_EAGER")

    def __enter__(self) -> RunningServer:
        assert self.is_marked, "a test that starts a server has the marker process"
        port = free_port()
        command = [sys.executable, "-m", "server", "--port", str(port), *self._arguments]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=self._environment)
        base_url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"server ended with {self._process.returncode}:\n{self._log.read_text()}")
            if is_ready(base_url + self._awaited):
                return RunningServer(base_url, self._process, self._log)
            if time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"server not ready after {READY_TIMEOUT_S} s:\n{self._log.read_text()}")
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise


@contextlib.contextmanager
def serving(folder: Path, config: Path | dict[str, Any], *arguments: str, **options: Any) -> Iterator[httpx.Client]:
    """Client of a server that has its log in folder; options are httpx's."""
    with start_server(folder / "log", *arguments, config=config) as server, server.client(**options) as client:
        yield client


def engine_pid(server_pid: int) -> int:
    """Process id of a server's engine, not of the one that stands by. StopIteration where there is none."""
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    return next(int(child) for child in children if Path(f"/proc/{child}/comm").read_text() == "nf4-engine\n")


def until(condition: Callable[[], object], timeout_s: float = 90.0) -> float:
    """Wait until a condition holds; the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - began


def until_ready(server: RunningServer) -> None:
    """Wait until /health is 200."""
    until(lambda: is_ready(f"{server.base_url}/health"), READY_TIMEOUT_S)
