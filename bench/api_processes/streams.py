"""Clients that cost next to nothing: they read sockets and count bytes."""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_USAGE = re.compile(rb'"completion_tokens":(\d+)')


@dataclass
class Stream:
    """One streamed answer as its client saw it. Times are seconds on the monotonic clock."""

    socket: socket.socket
    sent: float
    first: float = 0.0
    last: float = 0.0
    events: int = 0
    tail: bytes = b""
    """The latest bytes; the answer's last events, once it has ended."""
    tokens: int = field(default=0)

    @property
    def whole(self) -> bool:
        """Whether the answer came to its end."""
        return b"data: [DONE]" in self.tail


def run_streams(
    port: int, model: str, count: int, tokens: int, timeout_s: float, prompts: Sequence[str] = ("Tell me a story.",)
) -> list[Stream]:
    """Ask for `count` answers of `tokens` tokens at once, each on a connection of its own, and read all.

    The prompts take turns. Raises TimeoutError.
    """
    requests = [_request(model, prompts[index % len(prompts)], tokens) for index in range(count)]
    selector = selectors.DefaultSelector()
    # Connections first, so that the processes have their shares before the work begins.
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    streams = []
    for connection, request in zip(sockets, requests, strict=True):
        connection.sendall(request)
        connection.setblocking(False)
        stream = Stream(connection, time.monotonic())
        streams.append(stream)
        selector.register(connection, selectors.EVENT_READ, stream)
    end = time.monotonic() + timeout_s
    while selector.get_map():
        if time.monotonic() > end:
            raise TimeoutError(f"{len(selector.get_map())} of {count} streams had not ended after {timeout_s:.0f} s")
        for key, _ in selector.select(1.0):
            if not _read(key.data):
                selector.unregister(key.data.socket)
                key.data.socket.close()
        # All that came meanwhile is read at once, because that is cheaper than reading event by event.
        time.sleep(0.002)
    return streams


def _request(model: str, prompt: str, tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }
    ).encode()  # fmt: skip
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def _read(stream: Stream) -> bool:
    """Take what has come; False at the end."""
    data = stream.socket.recv(1 << 18)
    if not data:
        found = _USAGE.findall(stream.tail)
        stream.tokens = int(found[-1]) if found else 0
        return False
    stream.last = time.monotonic()
    if b'"content":"' in data and not stream.first:
        stream.first = stream.last
    # An event that is divided between two reads is counted in the one with its beginning, unless that is divided.
    stream.events += (stream.tail[-5:] + data).count(b"data: ")
    stream.tail = (stream.tail + data)[-2000:]
    return True
