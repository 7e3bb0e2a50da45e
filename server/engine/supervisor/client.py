"""The engine as the API process that supervises it sees it: the process behind it is watched and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from server.config import Config
from server.engine.supervisor.adapters import AdapterList
from server.engine.supervisor.base import EngineBase, EngineStatus, EngineUnavailableError, State
from server.engine.supervisor.child import Child
from server.engine.supervisor.process import EngineProcess
from server.engine.supervisor.standby import Standby
from server.engine.supervisor.watch import EngineRun
from server.types import (
    AbortRequest,
    AdapterResult,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    GenerateRequest,
    LoadAdapter,
    LoadProgress,
    RemoveClient,
    Shutdown,
    StepOutputs,
    UnloadAdapter,
)

logger = logging.getLogger(__name__)

# An engine that fails to start this many times in a row is given up.
MAX_FAILED_STARTS = 5
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STOP_GRACE_S = 10.0


class EngineClient(EngineBase):
    """One engine process, kept alive. Use from one event loop only.

    start() returns once the process has been started. Listeners are called in the event loop with every StepOutputs,
    before the requests see it.
    """

    def __init__(self, config: Config, checkpoint_folder: Path, first: Child | None = None) -> None:
        """first: a process that the first engine is to run in, which imports what it needs; None: one will be started."""
        super().__init__(EngineStatus("loading", stage="starting the engine"))
        self._config = config
        self._folder = checkpoint_folder
        self._first = first
        self._adapters = AdapterList(config.engine.lora_modules)
        self._step_listeners: list[Callable[[StepOutputs], None]] = []
        self._process: EngineProcess | None = None
        self._standby = Standby(config, self._is_busy)
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running engine."""
        return self._process.pid if self._process else None

    @property
    def folder(self) -> Path | None:
        """Folder of the running engine's sockets, for other API processes; a new one for every engine."""
        return self._process.folder if self._process else None

    def remove_client(self, client: int) -> None:
        """Another API process has ended: the engine forgets its requests."""
        if self._process is not None:
            self._process.send(RemoveClient(client))

    def add_step_listener(self, listener: Callable[[StepOutputs], None]) -> None:
        """Call listener with every step's outputs and stats (for metrics). It must not raise and not block."""
        self._step_listeners.append(listener)

    async def start(self) -> None:
        """Start the engine process and keep one running until stop(). Returns at once; see wait_ready()."""
        if self._keeper is not None:
            raise RuntimeError("the engine client was started before")
        self._keeper = asyncio.create_task(self._keep_running(), name="engine-keeper")

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of the LoRA adapters that requests may name, by name."""
        return self._adapters.folders

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in a folder under name, replacing one of that name; requests may name it afterwards.

        Raises EngineUnavailableError when the engine is not ready, and AdapterError when it refuses the adapter or is
        loading another one of that name.
        """
        if self._status.state != "ready" or self._process is None:
            raise EngineUnavailableError(f"the engine is {self._status.state}")
        await self._adapters.load(LoadAdapter(name, path), self._process.send)

    def unload_adapter(self, name: str) -> bool:
        """Forget an adapter; False when there is none of that name. Requests that run with it go on to their end."""
        if not self._adapters.forget(name):
            return False
        if self._process is not None:
            self._process.send(UnloadAdapter(name))
        return True

    async def stop(self) -> None:
        """End the engine process and all requests (finish_reason "abort"). Idempotent."""
        # At once: the process may take longer to end than the requests' clients are waited for.
        self._finish_all("abort", None)
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        await self._standby.end()
        self._finish_all("abort", None)
        self._set_status(EngineStatus("stopped"))

    def kill(self) -> None:
        """Kill the engine process at once, for when this process ends at once; nothing else of this object works then."""
        if self._process is not None:
            self._process.kill()

    @property
    def _takes_requests(self) -> bool:
        return super()._takes_requests and self._process is not None

    def _send(self, message: GenerateRequest | AbortRequest) -> None:
        if self._process is not None:
            self._process.send(message)

    def _prepare_standby(self) -> None:
        """Have a process ready for when this engine dies; call once it takes requests."""
        if self._status.ready is not None:
            self._standby.prepare(self._status.ready.device)

    def _is_busy(self) -> bool:
        # The engine's own figures count requests of other API processes, too.
        return self.num_requests > 0 or self._stats.running > 0 or self._stats.waiting > 0

    def _finish_all(self, reason: Literal["abort", "error"], error: str | None) -> None:
        super()._finish_all(reason, error)
        self._adapters.engine_ended(error or "the engine was stopped")

    async def _keep_running(self) -> None:
        failed_starts = 0
        while True:
            message, fatal, was_ready = await self._run_once()
            self._finish_all("error", f"the engine ended: {message}")
            self._stats = EngineStats()
            failed_starts = 0 if was_ready else failed_starts + 1
            if fatal or failed_starts >= MAX_FAILED_STARTS:
                if not fatal:
                    logger.error("engine failed: %s", message)
                await self._standby.end()
                self._set_status(EngineStatus("failed", message=message))
                return
            wait_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**failed_starts)
            logger.error("engine ended: %s; starting it again in %.1f s", message, wait_s)
            self._set_status(EngineStatus("restarting", stage="starting the engine again", message=message))
            await asyncio.sleep(wait_s)
            self.restarts += 1

    async def _run_once(self) -> tuple[str, bool, bool]:
        """Run one engine process to its end: (why it ended, whether another start is pointless, was it ready)."""
        config = self._config
        try:
            first, self._first = self._first, None
            child = first or await self._standby.take()
            process = await EngineProcess.start(self._folder, config, self._adapters.changed, child)
        except OSError as e:
            return f"it could not be started: {e}", False, False
        self._process = process
        run = EngineRun(process, self._handle, self._prepare_standby)
        try:
            return await run.until_end(config.engine.start_timeout_s)
        finally:
            self._process = None
            with contextlib.suppress(Exception):
                process.send(Shutdown())
            await process.end(STOP_GRACE_S if run.healthy else 1.0)

    def _handle(self, message: FromEngine) -> None:
        match message:
            case StepOutputs():
                self._stats = message.stats
                for listener in self._step_listeners:
                    listener(message)
                self._deliver(message.outputs)
            case LoadProgress(stage, fraction):
                state: State = "restarting" if self._status.state == "restarting" else "loading"
                self._set_status(EngineStatus(state, stage=stage, fraction=fraction, message=self._status.message))
            case AdapterResult():
                self._adapters.answered(message)
            case EngineReady(adapters=loaded):
                for name in self._adapters.engine_began(loaded):
                    if self._process is not None:
                        self._process.send(UnloadAdapter(name))
                self._set_status(EngineStatus("ready", ready=message))
            case EngineFailed():
                pass  # EngineRun remembers it and tells when the process has ended
