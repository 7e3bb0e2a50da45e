"""The outermost layer gives every request an id, a log line and a place in the metrics, and turns faults into answers."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import PACKAGE
from server.api.http import ignored
from server.api.http.deadline import note_timeout
from server.api.http.errors import internal_error
from server.logs import request_id
from server.observability.metrics import Metrics
from server.observability.timeline import RequestTimeline, server_timing, timelines
from server.observability.tracing import FinishedRequest, Tracing

logger = logging.getLogger(f"{PACKAGE}.access")

HEADER = "X-Request-ID"
_WELL_FORMED = re.compile(rb"[!-~]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# Asked every few seconds by machines.
_QUIET_ROUTES = frozenset({"/health", "/metrics"})


class RequestLayer:
    """ASGI middleware; see the module."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        tracing: Tracing | None = None,
        unknown_options: ignored.UnknownOptions = "warn",
    ) -> None:
        self._app = app
        self._unknown_options = unknown_options
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        current = _request_id(scope)
        status = 0
        sequences: list[RequestTimeline] = []
        options = ignored.IgnoredOptions(self._unknown_options)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = current
                if names := options.header():
                    headers[ignored.HEADER] = names
                # A streamed answer's head goes out before there is anything to tell; "timings" are in its last event.
                if timing := server_timing(sequences):
                    headers["Server-Timing"] = timing
            await send(message)

        token = request_id.set(current)
        timelines.set(sequences)
        ignored.current.set(options)
        note_timeout(scope)
        scope.setdefault("state", {})
        self._metrics.http_in_flight.inc()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("a request failed")
            if status:
                raise  # the answer has begun; only cutting the connection tells the client
            scope["state"]["rejection"] = "internal_error"
            await internal_error(current).response()(scope, receive, send_with_id)
        finally:
            self._metrics.http_in_flight.dec()
            self._account(scope, status, time.monotonic() - started)
            if self._tracing is not None:
                self._trace(self._tracing, scope, FinishedRequest(current, status, started, sequences))
            request_id.reset(token)

    @staticmethod
    def _trace(tracing: Tracing, scope: Scope, request: FinishedRequest) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        if route not in _QUIET_ROUTES:
            method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            tracing.record(request, method, route, headers)

    def _account(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        # A method is the client's free choice; a label must not be.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.http_answered(method, route, status, seconds)
        rejection = scope["state"].get("rejection")
        if rejection is not None:
            self._metrics.rejected(rejection)
        level = logging.DEBUG if route in _QUIET_ROUTES else logging.INFO
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
        logger.log(level, "%s %s %d %.1f ms", method, path[:200], status, 1000 * seconds)


def _request_id(scope: Scope) -> str:
    """The client's X-Request-ID where it is usable, or a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _WELL_FORMED.fullmatch(value):
            return str(value.decode("ascii"))
    return uuid.uuid4().hex
