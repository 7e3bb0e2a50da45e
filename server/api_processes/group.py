"""The first API process' view of the others: it starts them, tells them of the engine, and replaces those that die."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI

from server import PACKAGE
from server.api.answering.service import Service
from server.api.http.counts import Counts
from server.api_processes.alone import Alone, Progress
from server.api_processes.link import Applied, Ask, Link, Listening, Setup, State, ToFirst
from server.api_processes.place import Place
from server.api_processes.relay import answer
from server.config import Config
from server.engine.supervisor.base import EngineBase, EngineUnavailableError
from server.engine.supervisor.child import Child
from server.engine.supervisor.client import EngineClient
from server.observability.many_processes import Processes

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
HEALTHY_S = 30.0
"""A process that has run for this long did not fail to start."""
APPLIED_S = 5.0
"""Time for processes to apply a new state; one that hangs must not hold up the others."""
END_GRACE_S = 5.0


class _Other:
    """A process that runs."""

    def __init__(self, child: asyncio.subprocess.Process, link: Link[ToFirst], client: int) -> None:
        self.child = child
        self.link = link
        self.client = client
        self.applied = 0
        """The newest state that it has applied."""


class Group(Alone):
    """The first of several API processes. Use from one event loop only."""

    def __init__(
        self, config: Config, place: Place, address: tuple[int, tuple[Any, ...]], child: Child | None = None
    ) -> None:
        """address: family and address that all listen on; child: see Alone. Raises OSError."""
        self._place = place
        self._count = config.http.api_processes
        super().__init__(config, child)
        self._address = address
        self._numbers = itertools.count(1)
        self._running: dict[int, _Other] = {}
        """By row."""
        self._once_up: set[int] = set()
        """Rows of processes that have come up once, or failed to."""
        self._changed = asyncio.Event()
        self._version = 0
        self._checkpoint: Path | None = None
        self._service: Service | None = None
        self._app: FastAPI | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._asked: set[asyncio.Task[None]] = set()
        self._settled = False
        self._ending = False
        self.processes = Processes(place.metrics, self._pids)

    def _make_counts(self, keys: int) -> Counts:
        Counts.create(self._place.counts, keys, self._count)
        return Counts(keys, self._count, 0, self._place.counts)

    def _pids(self) -> dict[int, int]:
        return {0: os.getpid()} | {row: other.child.pid for row, other in self._running.items()}

    async def begin(self, service: Service, app: FastAPI) -> None:
        """Start the others."""
        self._service, self._app = service, app
        service.settled = False
        service.spread = self.spread
        service.when_draining = self.tell
        for row in range(1, self._count):
            self._keepers.append(asyncio.create_task(self._keep(row), name=f"api-process-{row}"))

    async def engine(self, progress: Progress) -> tuple[Path, EngineBase]:
        self._checkpoint, engine = await super().engine(progress)
        engine.add_status_listener(lambda _: self.tell())
        return self._checkpoint, engine

    async def settle(self, service: Service) -> None:
        """Wait until the engine is ready and all others have come up once, or failed to."""
        with contextlib.suppress(EngineUnavailableError):
            assert service.engine is not None
            await service.engine.wait_ready()
            await self._until(lambda: len(self._once_up) == self._count - 1)
            self._settled = True
            await self.spread()
            service.settled = True

    async def end(self) -> None:
        """Let the others answer what they have begun to, and end them."""
        self._ending = True
        if self._service is None:
            return
        self.tell()
        _, late = await asyncio.wait(self._keepers, timeout=self._config.http.drain_timeout_s + END_GRACE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def tell(self) -> None:
        """Tell all others the present state."""
        self._note_change()
        self._version += 1
        state = self._state()
        for other in self._running.values():
            other.link.send(state)

    async def spread(self) -> None:
        """Tell all others the present state, and wait until they have applied it."""
        self.tell()
        version = self._version
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(APPLIED_S):
                await self._until(lambda: all(other.applied >= version for other in self._running.values()))

    def _state(self) -> State:
        service = self._service
        assert service is not None
        engine = service.engine
        assert engine is None or isinstance(engine, EngineClient)
        failed = service.preparation.state == "failed"
        return State(
            version=self._version,
            status=service.preparation if engine is None or failed else engine.status,
            restarts=0 if engine is None else engine.restarts,
            checkpoint_folder=None if self._checkpoint is None or engine is None else str(self._checkpoint),
            engine_folder=None if engine is None or engine.folder is None else str(engine.folder),
            adapters=service.adapters,
            settled=self._settled,
            draining=self._drains,
        )

    @property
    def _drains(self) -> bool:
        return self._ending or (self._service is not None and self._service.draining)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _note_change(self) -> None:
        # Whoever waits on the event that is replaced here wakes up and looks anew.
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep(self, row: int) -> None:
        """Have a process for this row, and another one when it dies."""
        failures = 0
        while not self._drains:
            began = time.monotonic()
            try:
                reason = await self._run(row)
            except OSError as e:
                reason = f"it could not be started: {e}"
            self._once_up.add(row)
            self._note_change()
            if self._drains:
                return
            failures = 0 if time.monotonic() - began > HEALTHY_S else failures + 1
            wait_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**failures)
            logger.error("API process %d ended: %s; starting another in %.1f s", row, reason, wait_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._until(lambda: self._drains)

    async def _run(self, row: int) -> str:
        """Run one process to its end, and say why it ended. Raises OSError when it cannot be started."""
        other = await self._start(row, next(self._numbers))
        self._running[row] = other
        try:
            other.link.send(self._state())
            while (message := await other.link.receive()) is not None:
                self._take(row, other, message)
            code = await asyncio.wait_for(other.child.wait(), END_GRACE_S)
            return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        except TimeoutError:
            return "it went on without its link"
        finally:
            if other.child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    other.child.kill()
                await other.child.wait()
            other.link.close()
            del self._running[row]
            self._clear(row, other)
            self._note_change()

    def _clear(self, row: int, other: _Other) -> None:
        """Clear what a process that has ended had counted, and end its requests in the engine."""
        self.counts.clear(row)
        assert self.processes is not None
        self.processes.ended(other.child.pid)
        if self._service is not None and isinstance(self._service.engine, EngineClient):
            self._service.engine.remove_client(other.client)

    async def _start(self, row: int, client: int) -> _Other:
        ours, theirs = socket.socketpair()
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", f"{PACKAGE}.api_process", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A terminal's Ctrl-C must reach the first process only, which then lets the others end in order.
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        link = await Link.open(ours, msgspec.msgpack.Decoder(ToFirst))
        http = self._config.http
        config = self._config.model_copy(
            update={"http": http.model_copy(update={"api_keys": http.keys(), "api_keys_file": None})}
        )
        assert self._service is not None
        family, address = self._address
        link.send(
            Setup(
                client=client,
                row=row,
                config=config.model_dump(mode="json"),
                folder=str(self._place.folder),
                family=family,
                address=address,
                created=self._service.created,
            )
        )
        return _Other(child, link, client)

    def _take(self, row: int, other: _Other, message: ToFirst) -> None:
        match message:
            case Listening():
                self._once_up.add(row)
            case Applied(version):
                other.applied = version
            case Ask():
                assert self._app is not None
                task = asyncio.create_task(answer(self._app, message, other.link))
                self._asked.add(task)
                task.add_done_callback(self._asked.discard)
        self._note_change()
