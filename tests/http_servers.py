"""Small HTTP servers of tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """A handler that logs nothing; respond() answers GET and POST."""

    def respond(self) -> None:
        """Answer the request."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """See respond()."""
        self.respond()

    def do_POST(self) -> None:
        """See respond()."""
        self.respond()

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """Send a whole answer; a header's name has _ for -."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def answering(handler: type[Handler]) -> Iterator[ThreadingHTTPServer]:
    """A server on a free port of 127.0.0.1."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
