"""Limits of the connection itself, on real sockets: slow heads and bodies, large heads, too many connections."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import chat_body, metric, user
from tests.clients.random_model import write_random_model
from tests.conftest import RunningServer, start_server

LIMITS: dict[str, object] = {
    "header_timeout_s": 1, "body_timeout_s": 2, "max_headers": 20, "max_header_bytes": 4096, "max_connections": 12,
}  # fmt: skip
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def strict(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("strict")
    with start_server(folder / "log", config=write_random_model(folder, embedded_folder, LIMITS)) as running:
        yield running


class Client:
    """A socket to the server; what is received is read until the server closes."""

    def __init__(self, server: RunningServer) -> None:
        url = httpx.URL(server.base_url)
        assert url.port is not None
        self.socket = socket.create_connection((url.host, url.port), timeout=60)
        self.opened = time.monotonic()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def dribble(self, data: bytes, every_s: float) -> bytes:
        """Send byte after byte until there is something to read; returns that up to the server's end."""
        self.socket.settimeout(every_s)
        for byte in data:
            try:
                self.socket.sendall(bytes([byte]))
                if part := self.socket.recv(65536):
                    return part + self.rest()
                return b""
            except TimeoutError:
                continue
        raise AssertionError("the server went on waiting")

    def rest(self) -> bytes:
        self.socket.settimeout(60)
        received = b""
        while part := self.socket.recv(65536):
            received += part
        return received


def error(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer in OpenAI's shape that says that the connection ends."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert "content-type: application/json" in lines
    assert "connection: close" in lines
    assert f"content-length: {len(body)}" in lines
    found = json.loads(body)["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return int(lines[0].split()[1]), found


@pytest.mark.parametrize("dribbled", [b"GET /health HTTP/1.1\r\n" * 9, b"\r\n" * 99, b"GET /" + b"a" * 99])
def test_a_slow_head(strict: RunningServer, dribbled: bytes) -> None:
    with Client(strict) as client:
        status, found = error(client.dribble(dribbled, 0.1))
        assert (status, found["code"]) == (408, "request_timeout")
        assert "head" in found["message"]
        assert time.monotonic() - client.opened > 0.8


def test_a_slow_head_on_a_used_connection(strict: RunningServer) -> None:
    with Client(strict) as client:
        client.send(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200 OK" in client.socket.recv(65536)
        assert error(client.dribble(b"GET /version HTTP/1.1\r\n" * 9, 0.1))[0] == 408


@pytest.mark.parametrize(
    "begun",
    [HEAD + b"Content-Length: 100\r\n\r\n" + b'{"model"', HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"],
    ids=["length", "chunked"],
)
def test_a_body_that_stops(strict: RunningServer, http_of_strict: httpx.Client, begun: bytes) -> None:
    before = metric(http_of_strict, "nf4_request_rejections_total", reason="request_timeout")
    with Client(strict) as client:
        client.send(begun)
        status, found = error(client.rest())
        assert (status, found["code"]) == (408, "request_timeout")
        assert "body" in found["message"]
        assert time.monotonic() - client.opened > 1.8
    assert metric(http_of_strict, "nf4_request_rejections_total", reason="request_timeout") == before + 1
    assert metric(http_of_strict, "nf4_http_requests_in_flight") == 1


def test_a_slow_body_that_gets_on(strict: RunningServer) -> None:
    body = json.dumps(chat_body()).encode()
    with Client(strict) as client:
        client.send(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        for i in range(0, len(body), len(body) // 12):
            time.sleep(0.25)
            client.send(body[i : i + len(body) // 12])
        assert client.rest().startswith(b"HTTP/1.1 200 OK")
        assert time.monotonic() - client.opened > 2.4


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 21 + b"\r\n", "20 headers"),
        (b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 20_000, "20 headers"),
        (b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 5000 + b"\r\n\r\n", "4096 bytes"),
        (b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 5000, "4096 bytes"),
        (b"GET /" + b"a" * 5000, "4096 bytes"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;PAUSE" + b"a" * 5000, "4096 bytes"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n" + b"X-A: b\r\n" * 100, "20 headers"),
    ],
    ids=["one too many", "very many", "long value", "endless value", "endless target", "endless extension", "trailers"],
)
def test_a_large_head(strict: RunningServer, sent: bytes, said: str) -> None:
    with Client(strict) as client:
        for part in sent.split(b"PAUSE"):
            client.send(part)
            time.sleep(0.2)
        status, found = error(client.rest())
        assert (status, found["code"]) == (431, "headers_too_large")
        assert said in found["message"]


def test_a_head_at_the_limit(strict: RunningServer) -> None:
    with Client(strict) as client:
        client.send(b"GET /version HTTP/1.1\r\nConnection: close\r\n" + b"X-A: b\r\n" * 19 + b"\r\n")
        assert client.rest().startswith(b"HTTP/1.1 200 OK")
    with Client(strict) as client:
        client.send(b"GET /version HTTP/1.1\r\nConnection: close\r\nX-A: " + b"a" * 4000 + b"\r\n\r\n")
        assert client.rest().startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("asked", [b"h2c", b"websocket"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("piece", [7, 10_000])
def test_an_upgrade_is_ignored(strict: RunningServer, asked: bytes, chunked: bool, piece: int) -> None:
    """Java's HttpClient, and so Spring AI and LangChain4j, asks for HTTP/2; the body got lost."""
    body = json.dumps(chat_body()).encode()
    sent = HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\nUpgrade: " + asked + b"\r\n"
    sent += b"X-A: b\r\n" * 12  # counted once
    sent += (
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body)
        if chunked
        else b"Content-Length: %d\r\n\r\n" % len(body)
    )
    sent += body + (b"\r\n0\r\n\r\n" if chunked else b"")
    sent += b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n"
    with Client(strict) as client:
        for i in range(0, len(sent), piece):
            client.send(sent[i : i + piece])
            time.sleep(0.01)
        received = client.rest()
        assert received.count(b"HTTP/1.1 200 OK") == 2, received
        assert b'"choices"' in received


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_an_upgrade_on_a_connection_that_ends(strict: RunningServer, version: bytes) -> None:
    body = json.dumps(chat_body()).encode()
    with Client(strict) as client:
        client.send(HEAD.replace(b"1.1", version) + b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n")
        client.send(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert client.socket.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_connect_with_an_upgrade_is_answered(strict: RunningServer) -> None:
    with Client(strict) as client:
        client.send(b"CONNECT a:80 HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert error(client.rest())[0] == 400


def test_no_http(strict: RunningServer) -> None:
    with Client(strict) as client:
        client.send(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        status, found = error(client.rest())
        assert (status, found["code"]) == (400, "invalid_http_request")


def test_an_error_behind_a_request_does_not_land_in_its_answer(strict: RunningServer) -> None:
    """The second head is too large while the first request is being answered."""
    body = json.dumps(chat_body(stream=True, max_tokens=64, ignore_eos=True)).encode()
    with Client(strict) as client:
        client.send(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        begun = client.socket.recv(65536)
        client.send(b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 5000)
        assert b"headers_too_large" not in begun + client.rest()


def open_files(server: RunningServer) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def test_too_many_connections(strict: RunningServer) -> None:
    before = open_files(strict)
    with ExitStack() as stack:
        # Twelve that have begun a request: none of them is idle.
        busy = [stack.enter_context(Client(strict)) for _ in range(12)]
        for client in busy:
            client.send(HEAD)
        status, found = error(stack.enter_context(Client(strict)).rest())
        assert (status, found["code"]) == (503, "too_many_connections")
        for client in busy:
            assert error(client.rest())[0] == 408
    deadline = time.monotonic() + 60
    while open_files(strict) > before:
        assert time.monotonic() < deadline, "the server keeps connections that clients have closed"
        time.sleep(0.05)
    with ExitStack() as stack:
        # Twelve that a pool keeps for later make room for a new one.
        for _ in range(12):
            client = stack.enter_context(Client(strict))
            client.send(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"200 OK" in client.socket.recv(65536)
        assert httpx.get(f"{strict.base_url}/version", trust_env=False).status_code == 200


def test_streams_may_take_longer(strict: RunningServer) -> None:
    """Longer than the limits on heads and bodies: neither counts here."""
    body = chat_body(messages=user("Count."), stream=True, max_tokens=60_000, ignore_eos=True)
    began, longest = time.monotonic(), 0.0
    with httpx.stream(
        "POST", f"{strict.base_url}/v1/chat/completions", json=body, timeout=60, trust_env=False
    ) as answer:
        for line in answer.iter_lines():
            assert "error" not in line
            longest = time.monotonic() - began
            if longest > 3:
                break
    assert longest > 3


@pytest.fixture(scope="module")
def http_of_strict(strict: RunningServer) -> Iterator[httpx.Client]:
    with strict.client() as client:
        yield client
