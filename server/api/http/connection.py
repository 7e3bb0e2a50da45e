"""One connection: how long a client may take over a request's head and body, and how large the head may be.

uvicorn waits for a request for as long as the client likes, and takes heads of any size. Here a timer runs while a request
arrives, and only then: answers may stream for as long as they have tokens.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.api.http.counts import CONNECTIONS, Counts
from server.api.http.errors import INVALID_REQUEST, ApiError, unavailable
from server.config import HttpConfig

LINGER_S = 1.0
"""After an error the client gets this long to read it and to close; what it still sends is thrown away.

Closing at once would make the kernel answer that with a reset, on which clients lose the error.
"""
FRESH_S = 1.0
"""A connection that is no older may have a request on its way; it does not count as idle."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits; see limited()."""

    limits: HttpConfig
    counts: Counts
    rejected: Callable[[str], None]
    """Called with the error's code for each request that is refused here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._opened = self.loop.time()
        self._refused = False
        self._reading_head = False
        self._reading_body = False
        self._last_progress = 0.0
        self._head_bytes = 0
        self._head_lines = 0
        self._raw_bytes = 0
        self._parsed = False
        self._request_ended = False
        self._head_again = b""

    # The connection's life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or refuse it where there are too many and none of them is idle."""
        super().connection_made(transport)
        self.counts.add(CONNECTIONS, 1)
        limit = self.limits.max_connections
        if limit is not None and self.counts.total(CONNECTIONS) > limit and not self._close_an_idle_one():
            self._refuse(unavailable("The server has too many connections; try again.", "too_many_connections"))
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self.counts.add(CONNECTIONS, -1)
        self._stop_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def idle(self) -> bool:
        """Whether nothing has been asked that is not answered."""
        if self._reading_head or self._reading_body or self._refused:
            return False
        if self.cycle is None:
            return self.loop.time() - self._opened > FRESH_S
        return self.cycle.response_complete

    def _close_an_idle_one(self) -> bool:
        """Make room by closing a connection that a client keeps open for later, as its pool expects servers to do."""
        for other in self.connections:
            if (
                other is not self
                and isinstance(other, Connection)
                and other.idle()
                and not other.transport.is_closing()
            ):
                other.transport.close()
                return True
        return False

    # What arrives

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not (self._reading_head or self._reading_body):
            self._begin_head()
        elif self._reading_body:
            self._last_progress = self.loop.time()
        self._parsed = self._request_ended = False
        self._feed(data)
        # What the parser holds back, such as a header's value without its end, shows in no callback. A head is counted as
        # it came; elsewhere (a chunk's extension, a trailer) what came since the last callback.
        if self._reading_head and not self._request_ended:
            self._raw_bytes += len(data)
        else:
            self._raw_bytes = 0 if self._parsed else self._raw_bytes + len(data)
        self._check_head()

    def _feed(self, data: bytes) -> None:
        """Parse. An Upgrade is ignored, as RFC 9110 permits; uvicorn ignores it, too, but loses the body.

        Java's HttpClient asks for HTTP/2 with each request.
        """
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as e:
                head, self._head_again = self._head_again, b""
                if not head:
                    return
                # A new one: after "Connection: close" and in HTTP/1.0 the old parser drops what comes behind a head.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                data = head + data[e.args[0] :]
                self._begin_head()
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return
            else:
                return

    def on_message_begin(self) -> None:
        """A request's first byte; with pipelining the one before may have ended within the same data."""
        self._parsed = True
        if not self._reading_head:
            self._begin_head()
        super().on_message_begin()

    def _begin_head(self) -> None:
        self._reading_head = True
        self._head_bytes = self._head_lines = self._raw_bytes = 0
        self._last_progress = self.loop.time()
        self._start_timer(self.limits.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        self._parsed = True
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer behind a chunked body."""
        self._parsed = True
        self._head_lines += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._head_lines <= self.limits.max_headers and self._head_bytes <= self.limits.max_header_bytes:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request is passed on, unless its head is too large, or is to be parsed again without an Upgrade."""
        self._reading_head, self._reading_body = False, True
        self._check_head()
        if self._refused:
            return
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
            lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            self._head_again = b"\r\n".join([*lines, b"", b""])
            return
        self._last_progress = self.loop.time()
        if self.limits.body_timeout_s is not None:
            self._start_timer(self.limits.body_timeout_s)
        else:
            self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._parsed = True
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request's end."""
        if self._head_again:
            return
        self._parsed = self._request_ended = True
        self._reading_body = False
        self._stop_timer()
        if not self._refused:
            super().on_message_complete()

    # What is refused

    def send_400_response(self, msg: str) -> None:
        """In place of uvicorn's plain text."""
        if not self._refused:
            self._refuse(ApiError(400, f"{msg.rstrip('.')}.", code="invalid_http_request"))

    def _check_head(self) -> None:
        limits = self.limits
        if self._refused or self.transport.is_closing():
            return
        if self._head_lines > limits.max_headers:
            self._refuse(_too_large(f"The request has more than {limits.max_headers} headers."))
        elif max(self._head_bytes, self._raw_bytes) > limits.max_header_bytes:
            self._refuse(_too_large(f"The request's head is larger than {limits.max_header_bytes} bytes."))

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error if nothing has been answered yet, and close."""
        self._refused = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.rejected(error.code or error.type)
        cycle = self.cycle
        under_way = cycle is not None and not cycle.response_complete
        # A pipelined request behind one that is being answered: an answer now would land in the middle of that one's.
        silent = under_way and (cycle.response_started or not self._reading_body or bool(self.pipeline))
        if under_way:
            cycle.disconnected = True
            cycle.message_event.set()
        if silent or (cycle is not None and cycle.response_complete and self._reading_body):
            self.transport.close()
            return
        self.transport.write(_answer(error))
        self.loop.call_later(LINGER_S, self.transport.close)

    # The clock

    def _start_timer(self, seconds: float | None) -> None:
        self._stop_timer()
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._timed_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timed_out(self) -> None:
        """Refuse the request unless more of it has come since the timer was set, or it is this side that does not read."""
        limit = self.limits.body_timeout_s if self._reading_body else self.limits.header_timeout_s
        if limit is None or self.transport.is_closing():
            return
        answering = self.cycle is not None and not self.cycle.response_complete and not self._reading_body
        if self.flow.read_paused or answering:
            self._last_progress = self.loop.time()
        left = self._last_progress + limit - self.loop.time()
        if left > 0:
            self._start_timer(left)
            return
        part = "body" if self._reading_body else "head"
        self._refuse(
            ApiError(
                408,
                f"The request's {part} did not arrive: the server waited {limit:g} s for it.",
                type=INVALID_REQUEST,
                code="request_timeout",
            )
        )


def limited(limits: HttpConfig, counts: Counts, rejected: Callable[[str], None]) -> type[Connection]:
    """The protocol for uvicorn's http option; rejected is called with the code of every error given here.

    counts are those of all API processes; idle connections are closed in the one that has too many.
    """
    return type("Connection", (Connection,), {"limits": limits, "counts": counts, "rejected": staticmethod(rejected)})


def _too_large(message: str) -> ApiError:
    return ApiError(431, message, code="headers_too_large")


def _answer(error: ApiError) -> bytes:
    body = error.body()
    head = [
        f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name.lower()}: {value}" for name, value in error.headers.items()),
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
