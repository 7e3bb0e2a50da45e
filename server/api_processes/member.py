"""Another API process' view of the first: what it tells of the engine, and requests that only it can answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
from fastapi import FastAPI

from server.api.answering.service import Service
from server.api.http.counts import Counts
from server.api_processes.alone import Alone, Progress
from server.api_processes.link import Answer, Applied, Ask, FromFirst, Link, Listening, Setup, State, ToFirst
from server.api_processes.place import Place
from server.config import Config
from server.engine.supervisor.attached import AttachedEngine
from server.engine.supervisor.base import EngineBase, EngineUnavailableError
from server.observability.many_processes import Processes


class Member(Alone):
    """One of several API processes, not the first. Use from one event loop only."""

    def __init__(self, config: Config, setup: Setup, end: socket.socket, drain: Callable[[], None]) -> None:
        """end: this end of the link to the first process.

        drain: called once, when that process begins to shut down. Raises OSError.
        """
        self._setup = setup
        self._place = Place(Path(setup.folder))
        super().__init__(config)
        self._end = end
        self._drain = drain
        self._draining = False
        self._prepared = asyncio.Event()
        self._service: Service | None = None
        self._link: Link[FromFirst] | None = None
        self._engine = AttachedEngine(setup.client)
        self._checkpoint: asyncio.Future[Path] | None = None
        self._asks = itertools.count()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._reader: asyncio.Task[None] | None = None
        self.processes = Processes(self._place.metrics, lambda: {setup.row: os.getpid()})

    def _make_counts(self, keys: int) -> Counts:
        return Counts(keys, self._config.http.api_processes, self._setup.row, self._place.counts)

    async def begin(self, service: Service, app: FastAPI) -> None:
        """Follow what the first process says."""
        self._service = service
        service.created = self._setup.created
        service.settled = False
        self._checkpoint = asyncio.get_running_loop().create_future()
        self._link = await Link.open(self._end, msgspec.msgpack.Decoder(FromFirst))
        self._reader = asyncio.create_task(self._read(), name="first-process-reader")

    async def engine(self, progress: Progress) -> tuple[Path, EngineBase]:
        assert self._checkpoint is not None
        return await self._checkpoint, self._engine

    async def start(self, engine: EngineBase) -> None:
        """It is started by the first process."""

    async def settle(self, service: Service) -> None:
        """Wait until the engine is ready; where it cannot be started, the first process ends this one."""
        with contextlib.suppress(EngineUnavailableError):
            await self._engine.wait_ready()
            self._prepared.set()

    async def prepared(self) -> None:
        """Wait until requests could be answered."""
        await self._prepared.wait()

    def listening(self) -> None:
        """Tell the first process that this one takes connections."""
        self._send(Listening())

    async def ask(self, request: Ask) -> Answer:
        """The first process' answer to a request."""
        number = next(self._asks)
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answered
        self._send(msgspec.structs.replace(request, number=number))
        try:
            return await answered
        finally:
            del self._answers[number]

    def _send(self, message: ToFirst) -> None:
        assert self._link is not None
        self._link.send(message)

    async def _read(self) -> None:
        assert self._link is not None
        while (message := await self._link.receive()) is not None:
            match message:
                case State():
                    self._follow(message)
                case Answer(number):
                    if number in self._answers and not self._answers[number].done():
                        self._answers[number].set_result(message)
        # The first process has ended, however it did, and with it the engine.
        os._exit(1)

    def _follow(self, state: State) -> None:
        folder = None if state.engine_folder is None else Path(state.engine_folder)
        self._engine.follow(state.status, folder, state.adapters, state.restarts)
        assert self._checkpoint is not None
        if state.checkpoint_folder is not None and not self._checkpoint.done():
            self._checkpoint.set_result(Path(state.checkpoint_folder))
        assert self._service is not None
        self._service.settled = state.settled
        if state.draining and not self._draining:
            self._draining = True
            self._drain()
        self._send(Applied(state.version))
