"""One engine process from its start to its end, as the API process watches it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from server.engine.supervisor.process import EngineProcess
from server.types import EngineFailed, EngineReady, FromEngine


class EngineRun:
    """One engine process from its start to its end."""

    def __init__(
        self, process: EngineProcess, handle: Callable[[FromEngine], None], when_ready: Callable[[], None]
    ) -> None:
        """handle is called with every message; when_ready once, after the engine said that it takes requests."""
        self._process = process
        self._handle = handle
        self._when_ready = when_ready
        self._failed: EngineFailed | None = None
        self._ready = asyncio.Event()

    @property
    def healthy(self) -> bool:
        """Whether the process is worth waiting for when it is asked to leave."""
        return self._failed is None and self._ready.is_set()

    async def until_end(self, start_timeout_s: float) -> tuple[str, bool, bool]:
        """Wait for the end: (why it ended, whether another start is pointless, was it ready)."""
        reader = asyncio.create_task(self._read(), name="engine-reader")
        exited = asyncio.create_task(self._process.wait(), name="engine-exit")
        starting = asyncio.create_task(self._ready.wait(), name="engine-ready")
        try:
            await asyncio.wait({reader, exited, starting}, timeout=start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not (self._ready.is_set() or exited.done() or reader.done()):
                # Another start has the same time.
                return f"the engine was not ready after {start_timeout_s:g} s (start_timeout_s)", True, False
            if self._ready.is_set():
                self._when_ready()
            await asyncio.wait({reader, exited}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                # What it sent last (why it failed, most of all) may still be on its way.
                await asyncio.wait({reader}, timeout=0.2)
            return self._why(reader, exited), self._failed is not None and self._failed.fatal, self._ready.is_set()
        finally:
            for task in (reader, exited, starting):
                task.cancel()
            await asyncio.gather(reader, exited, starting, return_exceptions=True)

    def _why(self, reader: asyncio.Task[None], exited: asyncio.Task[int]) -> str:
        if self._failed is not None:
            return self._failed.message
        if exited.done():
            code = exited.result()
            return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        error = reader.exception() if reader.done() else None
        return f"its messages could not be read: {error}"

    async def _read(self) -> None:
        while True:
            try:
                message = await self._process.receive()
            except msgspec.DecodeError as e:
                raise RuntimeError(f"unreadable message from the engine: {e}") from e
            if isinstance(message, EngineFailed):
                self._failed = message
            self._handle(message)
            if isinstance(message, EngineReady):
                self._ready.set()
