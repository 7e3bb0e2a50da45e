"""The engine as the API process sees it: generate, abort, status; the process behind it is watched and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from server.config import Config
from server.engine.supervisor.adapters import AdapterList
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
    RequestOutput,
    Shutdown,
    StepOutputs,
    UnloadAdapter,
)

logger = logging.getLogger(__name__)

State = Literal["loading", "ready", "restarting", "failed", "stopped"]

# An engine that fails to start this many times in a row is given up.
MAX_FAILED_STARTS = 5
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STOP_GRACE_S = 10.0


class EngineUnavailableError(Exception):
    """The engine takes no requests now (loading, restarting, failed, stopped); the message is one line."""


@dataclass(frozen=True)
class EngineStatus:
    """What the engine is doing. stage and fraction are set while loading or restarting, ready once it is ready."""

    state: State
    stage: str = ""
    fraction: float = 0.0
    ready: EngineReady | None = None
    message: str = ""
    """Why it failed or is being restarted, in one line."""


class EngineClient:
    """One engine process, kept alive. Use from one event loop only.

    start() returns once the process has been started; wait_ready() waits for the model. generate() streams one
    request's outputs. Listeners are called in the event loop with every StepOutputs, before the requests see it.
    """

    def __init__(self, config: Config, checkpoint_folder: Path) -> None:
        self._config = config
        self._folder = checkpoint_folder
        self._status = EngineStatus("loading", stage="starting the engine")
        self._status_changed = asyncio.Event()
        self._stats = EngineStats()
        self._adapters = AdapterList(config.engine.lora_modules)
        self._requests: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._step_listeners: list[Callable[[StepOutputs], None]] = []
        self._status_listeners: list[Callable[[EngineStatus], None]] = []
        self._process: EngineProcess | None = None
        self._standby = Standby(config)
        self._keeper: asyncio.Task[None] | None = None
        self.restarts = 0
        """How often the engine was started again."""

    @property
    def status(self) -> EngineStatus:
        """What the engine is doing now."""
        return self._status

    @property
    def stats(self) -> EngineStats:
        """The engine's state after its latest step (zeros before the first and after a restart)."""
        return self._stats

    @property
    def pid(self) -> int | None:
        """Process id of the running engine."""
        return self._process.pid if self._process else None

    @property
    def num_requests(self) -> int:
        """Requests accepted and not finished."""
        return len(self._requests)

    def add_step_listener(self, listener: Callable[[StepOutputs], None]) -> None:
        """Call listener with every step's outputs and stats (for metrics). It must not raise and not block."""
        self._step_listeners.append(listener)

    def add_status_listener(self, listener: Callable[[EngineStatus], None]) -> None:
        """Call listener with every new status (for start-up progress and logs)."""
        self._status_listeners.append(listener)

    async def start(self) -> None:
        """Start the engine process and keep one running until stop(). Returns at once; see wait_ready()."""
        if self._keeper is not None:
            raise RuntimeError("the engine client was started before")
        self._keeper = asyncio.create_task(self._keep_running(), name="engine-keeper")

    async def wait_ready(self) -> EngineReady:
        """Wait until the engine accepts requests. Raises EngineUnavailableError when it failed or was stopped."""
        while True:
            status = self._status
            if status.state == "ready" and status.ready is not None:
                return status.ready
            if status.state in ("failed", "stopped"):
                raise EngineUnavailableError(status.message or status.state)
            await self._status_changed.wait()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as steps produce them; the last one has finish_reason set.

        A reader that is behind gets what steps have produced meanwhile as one output.
        Closing the iterator (or cancelling the task that reads it) before the end aborts the request. When the engine
        dies, the last output has finish_reason "error". Raises EngineUnavailableError when the engine is not ready and
        ValueError when the id is in use.
        """
        if self._status.state != "ready" or self._process is None:
            raise EngineUnavailableError(f"the engine is {self._status.state}")
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._requests[request.request_id] = outputs
        try:
            self._process.send(request)
            ending: RequestOutput | None = None
            while True:
                output = ending or await outputs.get()
                while output.finish_reason is None and not outputs.empty():
                    later = outputs.get_nowait()
                    # What came before an end that is not the model's must not be lost with it.
                    if later.finish_reason in ("error", "abort"):
                        ending = later
                        break
                    output = output.followed_by(later)
                if output.finish_reason is not None:
                    self._forget(request.request_id, outputs)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if self._forget(request.request_id, outputs):
                self._send_abort([request.request_id])

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests; their generate() iterators end with finish_reason "abort". Unknown ids are ignored."""
        known = [i for i in request_ids if i in self._requests]
        for request_id in known:
            self._requests.pop(request_id).put_nowait(RequestOutput(request_id, [], finish_reason="abort"))
        if known:
            self._send_abort(known)

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
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        await self._standby.end()
        self._finish_all("abort", None)
        self._set_status(EngineStatus("stopped"))

    async def _prepare_standby(self) -> None:
        """Have a process ready for when this engine dies; call once it takes requests."""
        if self._status.ready is not None:
            await self._standby.prepare(self._status.ready.device)

    def _forget(self, request_id: str, outputs: asyncio.Queue[RequestOutput]) -> bool:
        """Whether the request was still known; the id may meanwhile belong to a newer request."""
        if self._requests.get(request_id) is not outputs:
            return False
        del self._requests[request_id]
        return True

    def _send_abort(self, request_ids: list[str]) -> None:
        if self._process is not None:
            self._process.send(AbortRequest(request_ids))

    def _set_status(self, status: EngineStatus) -> None:
        self._status = status
        # Whoever waits on the event that is replaced here wakes up and looks at the status anew.
        self._status_changed.set()
        self._status_changed = asyncio.Event()
        for listener in self._status_listeners:
            listener(status)

    def _finish_all(self, reason: Literal["abort", "error"], error: str | None) -> None:
        requests, self._requests = self._requests, {}
        for request_id, outputs in requests.items():
            outputs.put_nowait(RequestOutput(request_id, [], finish_reason=reason, error=error))
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
            process = await EngineProcess.start(self._folder, config, self._adapters.changed, self._standby.take())
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
                for output in message.outputs:
                    # Absent: aborted while the engine was producing this.
                    queue = self._requests.get(output.request_id)
                    if queue is not None:
                        queue.put_nowait(output)
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
