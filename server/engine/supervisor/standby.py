"""A process that has imported what an engine needs and waits to become the next one: more than half of a start on CPU."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable

from server.config import Config
from server.engine.supervisor.child import Child, start_child

logger = logging.getLogger(__name__)

END_GRACE_S = 1.0
# Imports begin when nothing has run for this long. They yield to requests, yet cost them something: caches, memory
# bandwidth, the time until a core is free again.
IDLE_S = 3.0
# A server that is never idle gets a standby process, too; its imports use only the time that requests leave of the cores.
PATIENCE_S = 30.0
POLL_S = 0.25


class Standby:
    """At most one such process. Without one, or when it has died, an engine just takes longer to start."""

    def __init__(self, config: Config, is_busy: Callable[[], bool]) -> None:
        """is_busy: whether requests run or wait now."""
        self._config = config
        self._is_busy = is_busy
        self._starting: asyncio.Task[None] | None = None
        self._child: _Importing | None = None

    def prepare(self, device: str) -> None:
        """Have one soon, where the configuration wants it beside an engine on this device and there is none."""
        wanted = self._config.engine.standby
        # On a GPU the imports alone (bitsandbytes asks what it can do) would take hundreds of MB of its memory.
        if not (device == "cpu" if wanted is None else wanted):
            return
        if self._starting is None and (self._child is None or not self._child.lives):
            self._starting = asyncio.create_task(self._start(), name="standby-start")

    async def take(self) -> Child | None:
        """The process, which is the caller's from here on; None where none is alive that has imported everything.

        One that still imports is ended: it does so at the lowest priority, and a new process is there sooner.
        """
        await self._stop_starting()
        child, self._child = self._child, None
        if child is None:
            return None
        if child.lives and child.is_done():
            return child.process
        await child.end(grace_s=0.0)
        return None

    async def end(self) -> None:
        """End the process, if there is one."""
        await self._stop_starting()
        child, self._child = self._child, None
        if child is not None:
            await child.end(END_GRACE_S)

    async def _start(self) -> None:
        await self._until_idle()
        if self._child is not None:
            await self._child.end(grace_s=0.0)
        try:
            self._child = _Importing.start(self._config)
        except OSError as e:
            logger.warning("no engine stands by: %s", e)
        self._starting = None

    async def _until_idle(self) -> None:
        begun = worked = time.monotonic()
        while (now := time.monotonic()) - worked < IDLE_S and now - begun < PATIENCE_S:
            await asyncio.sleep(POLL_S)
            if self._is_busy():
                worked = time.monotonic()

    async def _stop_starting(self) -> None:
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.wait({starting})


class _Importing:
    """A process that imports, and says through a pipe when it is done."""

    def __init__(self, process: Child, done: int) -> None:
        self.process = process
        self._done = done

    @classmethod
    def start(cls, config: Config) -> _Importing:
        """Raises OSError."""
        done, tells = os.pipe()
        os.set_blocking(done, False)
        try:
            return cls(start_child(config, tells_imported=tells), done)
        except BaseException:
            os.close(done)
            raise
        finally:
            os.close(tells)

    @property
    def lives(self) -> bool:
        return self.process.returncode is None

    def is_done(self) -> bool:
        """Whether everything is imported. Ask once: the pipe is closed then."""
        try:
            return os.read(self._done, 1) != b""
        except BlockingIOError:
            return False
        finally:
            os.close(self._done)
            self._done = -1

    async def end(self, grace_s: float) -> None:
        """Let the process leave within grace_s seconds, then kill it."""
        if self._done >= 0:
            os.close(self._done)
            self._done = -1
        self.process.close_input()
        try:
            await asyncio.wait_for(self.process.wait(), grace_s)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
