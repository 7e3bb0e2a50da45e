"""Images over http: only from hosts that are named, in public networks, and within the limits."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Iterator

import pytest

from server.images.client import ImageRefusedError
from server.images.fetching import ImageFetcher, is_public
from tests.http_servers import Handler, answering

MOST = 1000
_LET_GO = threading.Event()
"""Ends what the slow host takes its time for."""


class _Host(Handler):
    def respond(self) -> None:
        port = self.server.server_address[1]
        match self.path:
            case "/image":
                self.answer(200, b"bytes")
            case "/large":
                self.answer(200, bytes(MOST + 1))
            case "/endless":
                self.send_response(200)
                self.end_headers()
                for _ in range(100):
                    self.wfile.write(bytes(MOST))
            case "/slow":
                _LET_GO.wait()
            case "/once":
                self.answer(302, Location="/image")
            case "/loop":
                self.answer(302, Location="/loop")
            case "/away":
                self.answer(302, Location=f"http://other.example:{port}/image")
            case "/file":
                self.answer(302, Location="file:///etc/passwd")
            case _:
                self.answer(404)


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    with answering(_Host) as server:
        yield f"127.0.0.1:{server.server_port}"
        _LET_GO.set()


def fetcher(*hosts: str, limit_s: float = 60.0) -> ImageFetcher:
    """One that may connect to this machine."""
    return ImageFetcher(hosts, limit_s, lambda address: address.is_loopback)


async def test_an_image_and_one_behind_a_redirect(host: str) -> None:
    for path in ("image", "once"):
        assert await fetcher(host).fetch(f"http://{host}/{path}", MOST) == b"bytes"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("large", "1000 bytes"),
        ("endless", "1000 bytes"),
        ("slow", "within 1 s"),
        ("loop", "3 redirects"),
        ("away", "other.example"),
        ("file", "neither data: nor http"),
        ("missing", "404"),
    ],
)
async def test_what_a_host_answers(host: str, path: str, said: str) -> None:
    with pytest.raises(ImageRefusedError, match=said):
        await fetcher(host, limit_s=1.0 if path == "slow" else 60.0).fetch(f"http://{host}/{path}", MOST)


@pytest.mark.parametrize(
    ("hosts", "url", "said"),
    [
        ([], "http://example.com/a", "http.image_hosts"),
        (["example.com"], "http://example.org/a", "http.image_hosts"),
        (["example.com"], "http://example.com.evil.org/a", "http.image_hosts"),
        (["example.com"], "http://example.com:8080/a", "example.com:8080"),
        (["*.example.com"], "https://example.com/a", "http.image_hosts"),
        (["example.com"], "https://example.com@evil.org/a", "password"),
        (["example.com"], "ftp://example.com/a", "neither"),
        (["example.com"], "http://", "neither"),
        (["example.com"], "example.com/a", "neither"),
        (["example.com"], "http://[::1", "URL"),
    ],
)
async def test_hosts_that_are_not_named(hosts: list[str], url: str, said: str) -> None:
    with pytest.raises(ImageRefusedError, match=said):
        await ImageFetcher(hosts, 1.0).fetch(url, MOST)


async def test_addresses_that_are_not_public(host: str) -> None:
    """Addresses are refused whatever name leads there."""
    port = host.partition(":")[2]
    for name in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0"):
        named = ImageFetcher([f"{name.strip('[]')}:{port}"], 1.0)
        with pytest.raises(ImageRefusedError, match="not public"):
            await named.fetch(f"http://{name}:{port}/image", MOST)


def test_which_addresses_are_public() -> None:
    private = (
        "10.0.0.1 127.0.0.1 169.254.169.254 192.168.1.1 172.16.0.1 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 ::1"
    )
    private += " fe80::1 fc00::1 ::ffff:10.0.0.1 64:ff9b::a00:1 2002:a00:1:: ff02::1"
    for address in private.split():
        assert not is_public(ipaddress.ip_address(address)), address
    for address in ("93.184.216.34", "2606:2800:220:1::1"):
        assert is_public(ipaddress.ip_address(address)), address


def test_wildcards_and_ports(host: str) -> None:
    found = ImageFetcher(["*.Example.com", "other.org:81"], 1.0)
    for url in ("https://a.example.com/x", "http://b.a.EXAMPLE.com/x", "http://other.org:81/x"):
        assert found._checked(url)
