"""Logging set-up: one format, for people or JSON, for the server, uvicorn and the libraries, with the request's id."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request being answered; set by the API's outermost layer."""


class ConsoleFormatter(logging.Formatter):
    """`2026-01-31 12:00:00,123 INFO server.api: [request id] message`; without the id, as the engine writes it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter.format."""
        current = request_id.get()
        record.request = f"[{current}] " if current else ""
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, message, and request_id and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter.format."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := request_id.get():
            entry["request_id"] = current
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logging(level: str, style: Literal["console", "json"] = "console") -> None:
    """Log everything at or above level to stderr; other libraries only from warnings on, unless level is debug."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(number if number <= logging.DEBUG else max(number, logging.WARNING))
    for name in ("server", "nf4_kernels", "uvicorn"):
        logging.getLogger(name).setLevel(number)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # Connection noise that repeats what our own lines say.
    logging.getLogger("uvicorn.error").setLevel(max(number, logging.WARNING))
