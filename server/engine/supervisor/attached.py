"""The engine as an API process sees it that does not supervise it: its sockets, and what the first process tells of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from server.engine.supervisor.base import EngineBase, EngineStatus
from server.engine.supervisor.process import FROM_ENGINE, TO_ENGINE, client_address, clients_address, socket_address
from server.types import AbortRequest, ClientOutputs, GenerateRequest

logger = logging.getLogger(__name__)


class AttachedEngine(EngineBase):
    """Requests of the API process with this number (from 1 on). follow() says which engine there is, and how it is."""

    def __init__(self, client: int) -> None:
        super().__init__(EngineStatus("loading", stage="starting the engine"))
        self._client = client
        self._adapters: dict[str, str] = {}
        self._sockets: _Sockets | None = None

    @property
    def adapters(self) -> dict[str, str]:
        return self._adapters

    def follow(self, status: EngineStatus, folder: Path | None, adapters: dict[str, str], restarts: int) -> None:
        """Take what the first process says of the engine: its status, folder of sockets, adapters and restarts."""
        self._adapters = adapters
        self.restarts = restarts
        known = None if self._sockets is None else self._sockets.folder
        if known is not None and known != folder:
            self._detach(status)
        self._set_status(status)
        if self._sockets is None and folder is not None and status.state == "ready":
            try:
                self._sockets = _Sockets(self._client, folder, self)
            except zmq.ZMQError as e:  # the engine has ended meanwhile, which the first process is about to tell
                logger.debug("no sockets to the engine: %s", e)

    async def stop(self) -> None:
        self._finish_all("abort", None)
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None
        self._set_status(EngineStatus("stopped"))

    def take(self, outputs: ClientOutputs) -> None:
        """Hand what one step produced to its requests."""
        self._deliver(outputs.outputs)

    @property
    def _takes_requests(self) -> bool:
        return super()._takes_requests and self._sockets is not None

    def _send(self, message: GenerateRequest | AbortRequest) -> None:
        if self._sockets is None:
            return
        if isinstance(message, GenerateRequest):
            message = msgspec.structs.replace(message, client=self._client)
        self._sockets.send(message)

    def _detach(self, status: EngineStatus) -> None:
        """The engine that had this process' requests is gone."""
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None
        if status.state == "stopped":
            self._finish_all("abort", None)
        else:
            self._finish_all("error", f"the engine ended: {status.message or 'another one was started'}")


class _Sockets:
    """The sockets to one engine, and the task that reads its outputs."""

    def __init__(self, client: int, folder: Path, engine: AttachedEngine) -> None:
        """Raises zmq.ZMQError when the folder is gone."""
        self.folder = folder
        self._engine = engine
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ClientOutputs)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._outputs: zmq.asyncio.Socket = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        for socket in (self._requests, self._outputs):
            socket.set_hwm(0)
            socket.linger = 0
        try:
            self._outputs.bind(client_address(socket_address(folder, FROM_ENGINE), client))
        except zmq.ZMQError:
            self._close_sockets()
            raise
        self._requests.connect(clients_address(socket_address(folder, TO_ENGINE)))
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    def send(self, message: GenerateRequest | AbortRequest) -> None:
        """Queue a message; never blocks."""
        self._requests.send(self._encoder.encode(message), zmq.DONTWAIT)

    def close(self) -> None:
        """Close both."""
        self._reader.cancel()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._requests.close(linger=0)
        self._outputs.close(linger=0)
        self._context.term()

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                self._engine.take(self._decoder.decode(await self._outputs.recv()))
