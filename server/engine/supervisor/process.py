"""One engine process seen from the API side: its start, its sockets, its end.

Every engine process gets sockets of its own in a private folder, so a message meant for one that died can never reach
the one started after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from server.config import Config, EngineConfig
from server.engine.supervisor.child import Child, start_child
from server.types import FromEngine, LoadAdapter, ToEngine

TO_ENGINE, FROM_ENGINE = "to-engine", "from-engine"


class EngineSetup(msgspec.Struct, frozen=True):
    """First line of the engine's standard input, whose end means that the API process is gone."""

    to_engine: str
    """Address where the engine receives ToEngine messages."""
    from_engine: str
    """Address where the engine sends FromEngine messages."""
    checkpoint_folder: str
    engine: dict[str, Any]
    """EngineConfig, dumped."""
    adapters: list[LoadAdapter] = []
    """LoRA adapters that were loaded at run time into the engine before this one."""
    many_clients: bool = False
    """Whether other API processes than the one that starts the engine send requests, too."""

    def engine_config(self) -> EngineConfig:
        """The validated engine section."""
        return EngineConfig.model_validate(self.engine)


class EngineProcess:
    """A running engine and the two sockets to it."""

    def __init__(self, child: Child, folder: Path, context: zmq.Context[Any]) -> None:
        self._child = child
        self._folder = folder
        self._context = context
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._commands: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._events: zmq.asyncio.Socket = zmq.asyncio.Context.shadow(context).socket(zmq.PULL)
        socket: zmq.Socket[Any]
        for socket, name in ((self._commands, TO_ENGINE), (self._events, FROM_ENGINE)):
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(socket_address(folder, name))

    @classmethod
    async def start(
        cls,
        checkpoint_folder: Path,
        config: Config,
        adapters: list[LoadAdapter],
        child: Child | None = None,
    ) -> EngineProcess:
        """Make an engine of child, or of a new process; it reports on the sockets from here on.

        Raises OSError when it cannot be started.
        """
        folder = Path(tempfile.mkdtemp(prefix="nf4-engine-"))
        try:
            if child is None:
                child = start_child(config)
            process = cls(child, folder, zmq.Context())
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        setup = EngineSetup(
            to_engine=socket_address(folder, TO_ENGINE),
            from_engine=socket_address(folder, FROM_ENGINE),
            checkpoint_folder=str(checkpoint_folder),
            engine=config.engine.model_dump(mode="json"),
            adapters=adapters,
            many_clients=config.http.api_processes > 1,
        )
        with contextlib.suppress(ConnectionError):  # it died already; the exit code tells
            child.write(msgspec.json.encode(setup) + b"\n")
        return process

    @property
    def folder(self) -> Path:
        """Folder of the sockets."""
        return self._folder

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks (queues have no limit, the API bounds the requests it accepts)."""
        self._commands.send(self._encoder.encode(message), zmq.DONTWAIT)

    async def receive(self) -> FromEngine:
        """The next message. Raises msgspec.DecodeError for one that is not understood."""
        data = await self._events.recv()
        message: FromEngine = self._decoder.decode(data)
        return message

    async def wait(self) -> int:
        """Exit code, once the process has ended."""
        return await self._child.wait()

    def kill(self) -> None:
        """Kill the process and remove its sockets, without waiting."""
        self._child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def end(self, grace_s: float) -> None:
        """Let the process leave within grace_s seconds (by closing its standard input), then kill it; close all."""
        self._child.close_input()
        if self._child.returncode is None:
            try:
                await asyncio.wait_for(self._child.wait(), grace_s)
            except TimeoutError:
                self._child.kill()
                await self._child.wait()
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


def socket_address(folder: Path, name: str) -> str:
    """Address of one of the sockets between API and engine: TO_ENGINE or FROM_ENGINE."""
    return f"ipc://{folder}/{name}"


def clients_address(to_engine: str) -> str:
    """Address at which the engine takes requests of API processes other than the one that supervises it."""
    return f"{to_engine}.clients"


def client_address(from_engine: str, client: int) -> str:
    """Address at which another API process takes its outputs."""
    return f"{from_engine}.{client}"
