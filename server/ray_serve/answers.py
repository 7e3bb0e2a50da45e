"""Answers' messages on their way from replicas to an ingress: one TCP connection for each pair, beside Ray's calls.

Ray's stream of a call takes a remote call and several changes of thread for each item, and a token is an item. Here all
that a replica has for an ingress at a time, of whatever requests, is one frame. The calls themselves still go through Serve,
which routes, counts, cancels and tells when a replica is lost (ADR 30).

A connection begins with the receiver's token. A frame is its length (4 bytes, big-endian) and msgpack:
[[number, message], ...]. An empty message says only by which connection an answer will come. Answers whose connection
breaks are lost: a node that is switched off does not end its calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import os
import socket
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]

TOKEN_BYTES = 16
CONNECT_S = 5.0
# A connection from which nothing comes is asked after IDLE_S, and broken when that was in vain PROBES times.
IDLE_S, PROBE_S, PROBES = 5, 5, 3


class ConnectionLostError(Exception):
    """The connection broke by which the rest of an answer should have come."""


@dataclass(frozen=True)
class Address:
    """Address at which an ingress receives, and the token that says who may send."""

    host: str
    port: int
    token: bytes


@dataclass(frozen=True)
class Destination:
    """Destination of one answer: its number at an ingress."""

    address: Address
    number: int


Item = Message | BaseException | None
"""A message; the answer's end; what it ended with instead."""


@dataclass
class _Incoming:
    """An answer that is waited for, and by which connection it comes, once that is known."""

    items: asyncio.Queue[Item]
    source: asyncio.StreamWriter | None = None


class Receiver:
    """An ingress' end."""

    def __init__(self, host: str) -> None:
        """host: an address of this node that replicas on other nodes reach."""
        self._host = host
        self._token = os.urandom(TOKEN_BYTES)
        self._starting = asyncio.Lock()
        self._address: Address | None = None
        self._server: asyncio.Server | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, _Incoming] = {}

    async def address(self) -> Address:
        """Address at which this listens, from the first call on. Raises OSError."""
        async with self._starting:
            if self._address is None:
                self._server = await asyncio.start_server(self._receive, self._host, 0)
                port = self._server.sockets[0].getsockname()[1]
                self._address = Address(self._host, port, self._token)
        return self._address

    @contextlib.contextmanager
    def expect(self) -> Iterator[tuple[int, asyncio.Queue[Item]]]:
        """A number for one answer, and where its messages come in; None after the last, or what it ended with instead."""
        number, items = next(self._numbers), asyncio.Queue[Item]()
        self._waiting[number] = _Incoming(items)
        try:
            yield number, items
        finally:
            del self._waiting[number]

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _keep_alive(writer.get_extra_info("socket"))
        try:
            if not hmac.compare_digest(await reader.readexactly(TOKEN_BYTES), self._token):
                return
            while True:
                frame = await reader.readexactly(int.from_bytes(await reader.readexactly(4)))
                for number, message in msgspec.msgpack.decode(frame):
                    if incoming := self._waiting.get(number):
                        incoming.source = writer
                        if message != {}:
                            incoming.items.put_nowait(message)
        except (asyncio.IncompleteReadError, OSError):
            for incoming in self._waiting.values():
                if incoming.source is writer:
                    incoming.items.put_nowait(ConnectionLostError())
        finally:
            writer.close()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", PROBE_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Sender:
    """A replica's end: its connections, one for each ingress that has asked it."""

    def __init__(self) -> None:
        self._connections: dict[Address, asyncio.Task[Connection]] = {}

    async def connection(self, address: Address) -> Connection:
        """The connection to an ingress. Raises OSError or TimeoutError where there can be none."""
        opening = self._connections.get(address)
        if opening is None or (opening.done() and _is_of_no_use(opening)):
            opening = asyncio.create_task(Connection.open(address), name="connect to an ingress")
            self._connections[address] = opening
        return await asyncio.shield(opening)

    async def close(self) -> None:
        """Close all, with what is written sent."""
        for opening in self._connections.values():
            if opening.done() and not _is_of_no_use(opening):
                opening.result().close()
            else:
                opening.cancel()


class Connection:
    """To one ingress. What is put within one turn of the event loop goes out in one frame."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._frame: list[tuple[int, Message | None]] = []
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, address: Address) -> Connection:
        """Connect. Raises OSError or TimeoutError."""
        _, writer = await asyncio.wait_for(asyncio.open_connection(address.host, address.port), CONNECT_S)
        writer.write(address.token)
        return cls(writer)

    @property
    def closed(self) -> bool:
        """Whether the ingress is gone, or this was closed."""
        return self._writer.is_closing()

    def put(self, number: int, message: Message | None) -> None:
        """Send a message of an answer; empty: there will be some; None: its end."""
        if not self._frame:
            self._loop.call_soon(self._flush)
        self._frame.append((number, message))

    async def drain(self) -> None:
        """Wait while much is not yet sent. Raises ConnectionError when the ingress is gone."""
        await self._writer.drain()

    def close(self) -> None:
        """Send what was put, and close."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._frame and not self.closed:
            frame = msgspec.msgpack.encode(self._frame)
            self._writer.write(len(frame).to_bytes(4) + frame)
        self._frame = []


def _is_of_no_use(opened: asyncio.Task[Connection]) -> bool:
    return opened.cancelled() or opened.exception() is not None or opened.result().closed
