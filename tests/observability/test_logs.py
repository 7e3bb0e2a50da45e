"""One format for all logs."""

from __future__ import annotations

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
