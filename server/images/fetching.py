"""Images from the hosts that the configuration names, within limits of time and size, and from public addresses only."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import httpcore
import httpx

from server.images.client import ImageRefusedError
from server.images.data_urls import too_large

MOST_REDIRECTS = 3
_DEFAULT_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = [("Accept", "image/png, image/jpeg, image/webp, image/gif"), ("Accept-Encoding", "identity")]
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Whether an address is a public one, neither in a private network nor a way into one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None or address.teredo is not None or address in _NAT64:
            return False
    return address.is_global and not address.is_multicast


class ImageFetcher:
    """Fetches over http and https."""

    def __init__(self, hosts: Sequence[str], timeout_s: float, allowed: Callable[[Address], bool] = is_public) -> None:
        """hosts: "name", "name:port" or "*.name" for all below it. timeout_s: of a whole fetch, redirects among it.

        allowed: addresses that may be connected to.
        """
        self._hosts = frozenset(host.lower() for host in hosts)
        self._timeout_s = timeout_s
        self._allowed = allowed

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        """The bytes that a URL names. Raises ImageRefusedError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(url, max_bytes)
        except TimeoutError as e:
            raise ImageRefusedError(f"was not there within {self._timeout_s:g} s (http.image_timeout_s)") from e
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as e:
            raise ImageRefusedError(f"cannot be fetched: {' '.join(str(e).split())[:200] or type(e).__name__}") from e

    async def _follow(self, url: str, max_bytes: int) -> bytes:
        # Connections end with the fetch, and no proxy of the environment's is asked.
        async with httpcore.AsyncConnectionPool(network_backend=_CheckedAddresses(self._allowed)) as pool:
            for _ in range(MOST_REDIRECTS + 1):
                checked = self._checked(url)
                async with pool.stream("GET", str(checked), headers=_HEADERS) as response:
                    if response.status in _REDIRECTS:
                        target = _headers(response).get(b"location", b"")
                        url = _joined(checked, target)
                        continue
                    if response.status != 200:
                        raise ImageRefusedError(f"cannot be fetched: its host answers {response.status}")
                    return await _body(response, max_bytes)
        raise ImageRefusedError(f"is behind more than {MOST_REDIRECTS} redirects")

    def _checked(self, url: str) -> httpx.URL:
        """The URL, which names a host that images may come from."""
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as e:
            raise ImageRefusedError(f"has a URL that is none: {e}") from e
        if parsed.scheme not in _DEFAULT_PORTS or not parsed.host:
            raise ImageRefusedError("has a URL that is neither data: nor http(s):")
        if parsed.userinfo:
            raise ImageRefusedError("has a URL with a password")
        host, port = parsed.host.lower(), parsed.port or _DEFAULT_PORTS[parsed.scheme]
        if not self._is_listed(host, port, usual=port == _DEFAULT_PORTS[parsed.scheme]):
            raise ImageRefusedError(
                f"is on {host}:{port}, which is none of the hosts that images come from (http.image_hosts)"
            )
        return parsed

    def _is_listed(self, host: str, port: int, *, usual: bool) -> bool:
        above = [f"*.{host[i + 1 :]}" for i, letter in enumerate(host) if letter == "."]
        names = [host, *above]
        return any(f"{name}:{port}" in self._hosts or (usual and name in self._hosts) for name in names)


class _CheckedAddresses(httpcore.AsyncNetworkBackend):
    """Connects to addresses that it has checked itself, so that no second look-up can give others."""

    def __init__(self, allowed: Callable[[Address], bool]) -> None:
        self._allowed = allowed
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
        if not addresses or not all(map(self._allowed, addresses)):
            raise ImageRefusedError(f"is on {host}, which is at an address that is not public")
        return await self._backend.connect_tcp(str(addresses[0]), port, timeout, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _joined(url: httpx.URL, target: bytes) -> str:
    try:
        return str(url.join(target.decode("ascii")))
    except (httpx.InvalidURL, UnicodeDecodeError) as e:
        raise ImageRefusedError("is behind a redirect to no URL") from e


def _headers(response: httpcore.Response) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in response.headers}


async def _body(response: httpcore.Response, max_bytes: int) -> bytes:
    announced = _headers(response).get(b"content-length", b"")
    if announced.isdigit() and int(announced) > max_bytes:
        raise too_large(max_bytes)
    data = bytearray()
    async for chunk in response.aiter_stream():
        data += chunk
        if len(data) > max_bytes:
            raise too_large(max_bytes)
    return bytes(data)
