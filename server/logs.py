"""Logging set-up: one format, for people or JSON, for both processes, uvicorn and the libraries, with the request's id."""

from __future__ import annotations

import json
import logging
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal

from server import PACKAGE

LogFormat = Literal["console", "json"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request being answered; set by the API's outermost layer."""


def concerning(http_request_id: str) -> dict[str, str]:
    """The `extra` of a logger's call for a line about a request in a process that does not answer it: the engine."""
    return {"http_request_id": http_request_id}


def _concerned(record: logging.LogRecord) -> str:
    """Id of the HTTP request that a line is about; empty when it is about none."""
    return getattr(record, "http_request_id", "") or request_id.get()


class ConsoleFormatter(logging.Formatter):
    """`2026-01-31 12:00:00,123 INFO server.api: [request id] message`; the id only where a line is about a request."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        current = _concerned(record)
        record.request = f"[{current}] " if current else ""
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, and request_id and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := _concerned(record):
            entry["request_id"] = current
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logging(level: str, style: LogFormat = "console") -> None:
    """Log everything at or above level to stderr; other libraries only from warnings on, unless level is debug.

    Python's warnings and, in JSON, exceptions that nobody caught become lines of the log, too.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(number if number <= logging.DEBUG else max(number, logging.WARNING))
    for name in (PACKAGE, "nf4_kernels", "uvicorn"):
        logging.getLogger(name).setLevel(number)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.captureWarnings(True)
    if style == "json":
        sys.excepthook = _uncaught
        threading.excepthook = lambda hook: _uncaught(hook.exc_type, hook.exc_value, hook.exc_traceback)
    # It lacks kernels that ours replace.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # Connection noise that repeats what our own lines say.
    logging.getLogger("uvicorn.error").setLevel(max(number, logging.WARNING))


def _uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    if not issubclass(kind, SystemExit | KeyboardInterrupt):
        logging.getLogger(PACKAGE).critical("uncaught", exc_info=(kind, error or kind(), traceback))
