"""Logging set-up: one console format for the server, uvicorn and the libraries, with the request's id."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

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


def set_up_logging(level: str) -> None:
    """Log everything at or above level to stderr; other libraries only from warnings on, unless level is debug."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ConsoleFormatter())
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
