"""Checks of a machine before anything is installed on it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy import machine
from tests.http_servers import Handler, answering

ROOT = Path(__file__).parents[2]


def test_pythons_that_do_not_work_are_named() -> None:
    assert machine.missing() is None
    for version in ((3, 10, 4), (3, 14, 0)):
        line = machine.missing(version)
        assert f"{sys.executable} is Python 3.{version[1]}, and 3.11 to 3.13 work" in line
        assert "PYTHON=python3.12 make serve" in line


def test_make_ends_before_it_makes_anything(tmp_path: Path) -> None:
    command = ["make", "serve", f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}"]
    # Of the make that runs the tests, if one does.
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    environment = own | {"CXX": "no-such-compiler"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("error: there is no C++ compiler 'no-such-compiler' (Debian: apt-get install g++)\n")
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.fixture
def index() -> Iterator[str]:
    """A package index that has torch."""

    class Index(Handler):
        def respond(self) -> None:
            self.answer(200 if self.path == "/whl/cpu/torch/" else 404)

    with answering(Index) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_torchs_index_is_taken_if_it_has_torch(index: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine.main("torch-index", f"{index}/whl/cpu") == 0
    assert capsys.readouterr().out == f"--extra-index-url {index}/whl/cpu\n"
    assert machine.main("torch-index", f"{index}/elsewhere") == 0
    assert capsys.readouterr().out == ""


def test_an_index_that_does_not_answer_holds_nothing_up(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        assert machine.main("torch-index", url) == 0
        assert time.monotonic() - began < machine.TIMEOUT_S + 60  # it waits no longer; a busy machine does
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{url} does not answer" in said.err


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Makes a program on the path that prints something."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_HOME", raising=False)

    def make(name: str, prints: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{prints}\nEND\n")
        path.chmod(0o755)
        return path

    return make


def test_gpus_that_cannot_be_used_are_named(
    tool: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tool("nvidia-smi", "580.65.06, 8.9, NVIDIA GeForce RTX 4090\n580.65.06, 7.5, Tesla T4")
    assert machine.main("gpu") == 0
    old = "== warning: Tesla T4 has compute capability 7.5, and 8.0 or newer is needed: it is not used\n"
    assert capsys.readouterr().err == old
    tool("nvidia-smi", "550.120, 8.6, NVIDIA GeForce RTX 3060")
    machine.main("gpu")
    assert capsys.readouterr().err.startswith("== warning: NVIDIA's driver 550.120 is older than 580")
    tool("nvidia-smi", "[N/A], [N/A], Orin\nNo devices were found")
    assert list(machine.unusable()) == []


def test_an_nvcc_of_an_older_cuda_is_none(tool: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = tool("nvcc", "Cuda compilation tools, release 12.0, V12.0.140")
    assert machine.nvcc() is None
    tool("nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    assert machine.main("nvcc") == 0
    assert capsys.readouterr().out == f"{path}\n"
