"""One engine process seen from the API side: its start, its sockets, its end.

Every engine process gets sockets of its own in a private folder, so a message meant for one that died can never reach
the one started after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from server import PACKAGE
from server.config import Config, EngineConfig
from server.types import FromEngine, LoadAdapter, ToEngine

ENVIRONMENT = {
    # OpenMP threads spin this often before they sleep: long enough for the gaps within a step. GNU's default
    # (milliseconds) makes every step many times slower when another process, the API's own among them, takes a core.
    "GOMP_SPINCOUNT": "20000",
    # glibc keeps the memory of a step's intermediate results for the next step. By default it gives them back and has
    # their pages made anew: thousands of page faults in every prefill on CPU, 5 to 10 % of its time.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    # torch grows its segments of a GPU's memory instead of allocating new ones of other sizes: what it holds in reserve
    # beside Qwen3-8B's tensors falls from 0.55 to 0.12 GiB, and nothing becomes slower.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""What an engine's process has in its environment, unless the user's says otherwise."""


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


async def start_child(config: Config, *, tells_imported: int | None = None) -> asyncio.subprocess.Process:
    """Start engine/loop.py as a process, which waits for an EngineSetup.

    tells_imported: a pipe's end for writing. The process then stands by: it imports meanwhile what it will need, at the
    lowest priority, and writes a byte when that is done. Raises OSError.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", f"{PACKAGE}.engine.loop", "--log-level", config.log_level, "--log-format", config.log_format),
        *([] if tells_imported is None else ["--standby", str(tells_imported)]),
        stdin=asyncio.subprocess.PIPE,
        pass_fds=[] if tells_imported is None else [tells_imported],
        # A terminal's Ctrl-C must reach the API only, which then ends the engine in order.
        start_new_session=True,
        env={**ENVIRONMENT, **os.environ, "PYTHONUNBUFFERED": "1"},
    )


class EngineProcess:
    """A running engine and the two sockets to it."""

    def __init__(self, child: asyncio.subprocess.Process, folder: Path, context: zmq.Context[Any]) -> None:
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
        child: asyncio.subprocess.Process | None = None,
    ) -> EngineProcess:
        """Make an engine of child, or of a new process; it reports on the sockets from here on.

        Raises OSError when it cannot be started.
        """
        folder = Path(tempfile.mkdtemp(prefix="nf4-engine-"))
        try:
            if child is None:
                child = await start_child(config)
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
        assert child.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died already; the exit code tells
            child.stdin.write(msgspec.json.encode(setup) + b"\n")
            await child.stdin.drain()
        return process

    @property
    def folder(self) -> Path:
        """Where the sockets are."""
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
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def end(self, grace_s: float) -> None:
        """Let the process leave within grace_s seconds (by closing its standard input), then kill it; close all."""
        if self._child.returncode is None:
            if self._child.stdin is not None:
                self._child.stdin.close()
            try:
                await asyncio.wait_for(self._child.wait(), grace_s)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
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
    """Where the engine takes requests of all other API processes than the one that supervises it."""
    return f"{to_engine}.clients"


def client_address(from_engine: str, client: int) -> str:
    """Where another API process takes its outputs."""
    return f"{from_engine}.{client}"
