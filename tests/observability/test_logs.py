"""One format for all logs."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest

from server.observability.logs import request_id, set_up_logging


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    names = ("server", "nf4_kernels", "uvicorn", "uvicorn.error", "uvicorn.access")
    before = root.level, root.handlers[:], {name: logging.getLogger(name).level for name in names}
    yield
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
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    assert first == {"level": "info", "logger": "server.x", "message": "hello\nü", "request_id": "abc"}
    assert second["level"] == "error"
    assert "request_id" not in second
    assert second["exception"].endswith("ValueError: bad")
