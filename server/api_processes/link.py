"""Messages between the first API process and another: msgpack over a pair of sockets, each message after its length."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Generic, TypeVar

import msgspec

from server.engine.supervisor.base import EngineStatus

Received = TypeVar("Received")
_LENGTH_BYTES = 4


class Setup(msgspec.Struct, frozen=True):
    """First process to another, once, before everything else."""

    client: int
    """Number among all that were ever started, from 1 on; the engine knows it by this."""
    row: int
    """Its row of the counts, which the next process takes that replaces it; from 1 on."""
    config: dict[str, Any]
    """Config, dumped, with all API keys in it."""
    folder: str
    """Folder of what all share; see Place."""
    family: int
    """The family of the address to listen on."""
    address: tuple[Any, ...]
    created: int
    """When the server was started, in seconds since 1970: what models are said to be created at."""


class State(msgspec.Struct, tag="state", frozen=True):
    """First process to another, with every change: how the engine is, and what else all have to know."""

    version: int
    status: EngineStatus
    restarts: int
    checkpoint_folder: str | None
    engine_folder: str | None
    """Folder of the running engine's sockets."""
    adapters: dict[str, str]
    settled: bool
    draining: bool


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """First process to another: the answer to an Ask."""

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Listening(msgspec.Struct, tag="listening", frozen=True):
    """Another process to the first: it takes connections from now on."""


class Applied(msgspec.Struct, tag="applied", frozen=True):
    """Another process to the first: it has applied this State."""

    version: int


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Another process to the first: an HTTP request that only the first can answer."""

    number: int
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    scheme: str
    client: tuple[str, int] | None


ToFirst = Listening | Applied | Ask
FromFirst = State | Answer


class Link(Generic[Received]):
    """One end."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[Received]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    @classmethod
    async def open(cls, end: socket.socket, decoder: msgspec.msgpack.Decoder[Received]) -> Link[Received]:
        """Make a link of one of a pair of sockets."""
        reader, writer = await asyncio.open_connection(sock=end)
        return cls(reader, writer, decoder)

    def send(self, message: Setup | FromFirst | ToFirst) -> None:
        """Queue a message; never blocks. What is sent to a process that has ended is lost."""
        if not self._writer.is_closing():
            self._writer.write(_framed(message))

    async def receive(self) -> Received | None:
        """The next message; None once the other process has ended, or closed its end."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Close this end."""
        self._writer.close()


def read_setup(end: socket.socket) -> Setup:
    """Wait for the Setup, without an event loop. Raises EOFError when the first process ends before."""
    length = int.from_bytes(_exactly(end, _LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(_exactly(end, length), type=Setup)


def _exactly(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:  # MSG_WAITALL, too, gives less if a signal comes
        part = end.recv(count - len(data))
        if not part:
            raise EOFError("the first API process has ended")
        data += part
    return data


def _framed(message: Any) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data
