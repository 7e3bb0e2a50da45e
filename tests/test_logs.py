"""One format for all logs."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.logs import concerning, request_id, set_up_logging
from tests.clients.random_model import write_random_model
from tests.conftest import engine_pid, start_server, until_ready


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    hooks = sys.excepthook, threading.excepthook
    names = ("server", "nf4_kernels", "uvicorn", "uvicorn.error", "uvicorn.access")
    before = root.level, root.handlers[:], {name: logging.getLogger(name).level for name in names}
    yield
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    for name, level in before[2].items():
        logging.getLogger(name).setLevel(level)


def test_console_line_with_request_id(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info")
    token = request_id.set("abc")
    logging.getLogger("server.x").info("hello %d", 5)
    request_id.reset(token)
    logging.getLogger("uvicorn.error").warning("bye")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO server\.x: \[abc\] hello 5", first)
    assert second.endswith("WARNING uvicorn.error: bye")


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("warning")
    logging.getLogger("server.x").info("no")
    logging.getLogger("other").info("no")
    logging.getLogger("server.x").warning("yes")
    set_up_logging("info")
    logging.getLogger("other").info("no")
    assert capsys.readouterr().err.count("\n") == 1


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json")
    token = request_id.set("abc")
    logging.getLogger("server.x").info("hello\n%s", "ü")
    request_id.reset(token)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("server.x").exception("no")
    logging.getLogger("server.engine").error("failed", extra=concerning("def"))
    first, second, third = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert third["request_id"] == "def"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    assert first == {"level": "info", "logger": "server.x", "message": "hello\nü", "request_id": "abc"}
    assert second["level"] == "error"
    assert "request_id" not in second
    assert second["exception"].endswith("ValueError: bad")


def test_warnings_and_what_nobody_caught_are_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json")
    warnings.warn("old", FutureWarning, stacklevel=1)
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    sys.excepthook(ValueError, ValueError("bad"), None)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    first, second, third = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["logger"], first["level"]) == ("py.warnings", "warning")
    assert (second["level"], third["level"]) == ("critical", "critical")
    assert "ZeroDivisionError" in second["exception"]
    assert third["exception"] == "ValueError: bad"


@pytest.mark.rest
def test_every_line_of_a_server_is_json(embedded_folder: Path, tmp_path: Path) -> None:
    """Loading, requests, an engine that dies, the next one, the end."""
    config = write_random_model(tmp_path / "model", embedded_folder)
    arguments = ("--log-format", "json", "--log-level", "info")
    with start_server(tmp_path / "log", *arguments, config=config) as server:
        ask = {"model": "smollm2-135m-instruct", "prompt": "a", "max_tokens": 60000, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", f"{server.base_url}/v1/completions", json=ask, headers={"X-Request-ID": "mine"}, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(engine_pid(server.process.pid), signal.SIGKILL)
            assert any("engine_error" in line for line in lines)
        until_ready(server)
    written = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert all(line["time"] and line["level"] and line["logger"] and line["message"] for line in written)
    loggers = [line["logger"] for line in written]
    assert loggers.count("server.engine.start") == 2  # both engines
    assert any(line["message"].startswith("engine ended: killed by signal 9") for line in written)
    assert {line["logger"] for line in written if line.get("request_id") == "mine"} >= {
        "server.access",
        "server.api.answering.generation",
    }
    assert any(line["message"].startswith("Serving smollm2-135m-instruct on http://") for line in written)


def test_a_start_that_fails_says_so_in_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "server", "--port", "0", "--model", str(tmp_path), "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    last = [json.loads(line) for line in done.stderr.splitlines()][-1]
    assert last["level"] == "critical"
    assert str(tmp_path) in last["message"]
    assert done.stdout == ""
