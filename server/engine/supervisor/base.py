"""The engine as any API process sees it: its status, and requests whose outputs are handed to those who wait for them."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from server.types import (
    AbortRequest,
    EngineReady,
    EngineStats,
    GenerateRequest,
    RequestOutput,
)

State = Literal["loading", "ready", "restarting", "failed", "stopped"]


class EngineUnavailableError(Exception):
    """The engine takes no requests now (loading, restarting, failed, stopped); the message is one line."""


@dataclass(frozen=True)
class EngineStatus:
    """State of the engine. stage and fraction are set while loading or restarting, ready once it is ready."""

    state: State
    stage: str = ""
    fraction: float = 0.0
    ready: EngineReady | None = None
    message: str = ""
    """Why it failed or is being restarted, in one line."""


class EngineBase(abc.ABC):
    """Requests to one engine. Use from one event loop only.

    generate() streams one request's outputs; wait_ready() waits for the model.
    """

    def __init__(self, status: EngineStatus) -> None:
        self._status = status
        self._status_changed = asyncio.Event()
        self._stats = EngineStats()
        self._requests: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._status_listeners: list[Callable[[EngineStatus], None]] = []
        self.restarts = 0

    @abc.abstractmethod
    def _send(self, message: GenerateRequest | AbortRequest) -> None:
        """Queue a message to the engine, if there is one; never blocks."""

    @property
    @abc.abstractmethod
    def adapters(self) -> dict[str, str]:
        """Folders of the LoRA adapters that requests may name, by name."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """End all requests (finish_reason "abort"), and what belongs to this object. Idempotent."""

    @property
    def status(self) -> EngineStatus:
        """State of the engine now."""
        return self._status

    @property
    def stats(self) -> EngineStats:
        """The engine's state after its latest step (zeros before the first and after a restart).

        Only the API process that supervises the engine is told it.
        """
        return self._stats

    @property
    def num_requests(self) -> int:
        """Requests accepted and not finished."""
        return len(self._requests)

    def add_status_listener(self, listener: Callable[[EngineStatus], None]) -> None:
        """Call listener with every new status (for start-up progress and logs)."""
        self._status_listeners.append(listener)

    async def wait_ready(self) -> EngineReady:
        """Wait until the engine accepts requests. Raises EngineUnavailableError when it failed or was stopped."""
        while True:
            status = self._status
            if status.state == "ready" and status.ready is not None:
                return status.ready
            if status.state in ("failed", "stopped"):
                raise EngineUnavailableError(status.message or status.state)
            await self._status_changed.wait()

    @property
    def _takes_requests(self) -> bool:
        return self._status.state == "ready"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as steps produce them; the last one has finish_reason set.

        A reader that is behind gets all that steps have produced meanwhile as one output. Closing the iterator (or
        cancelling the task that reads it) before the end aborts the request. When the engine dies, the last output has
        finish_reason "error". Raises EngineUnavailableError when the engine is not ready and ValueError when the id is in
        use.
        """
        if not self._takes_requests:
            raise EngineUnavailableError(f"the engine is {self._status.state}")
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._requests[request.request_id] = outputs
        try:
            self._send(request)
            ending: RequestOutput | None = None
            while True:
                output = ending or await outputs.get()
                while output.finish_reason is None and not outputs.empty():
                    later = outputs.get_nowait()
                    # Outputs that came before an error or an abort must not be lost.
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
                self._send(AbortRequest([request.request_id]))

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests; their generate() iterators end with finish_reason "abort". Unknown ids are ignored."""
        known = [i for i in request_ids if i in self._requests]
        for request_id in known:
            self._requests.pop(request_id).put_nowait(RequestOutput(request_id, [], finish_reason="abort"))
        if known:
            self._send(AbortRequest(known))

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Hand a step's outputs to their requests."""
        for output in outputs:
            # Absent: aborted while the engine was producing this.
            queue = self._requests.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)

    def _forget(self, request_id: str, outputs: asyncio.Queue[RequestOutput]) -> bool:
        """Whether the request was still known; the id may meanwhile belong to a newer request."""
        if self._requests.get(request_id) is not outputs:
            return False
        del self._requests[request_id]
        return True

    def _finish_all(self, reason: Literal["abort", "error"], error: str | None) -> None:
        requests, self._requests = self._requests, {}
        for request_id, outputs in requests.items():
            outputs.put_nowait(RequestOutput(request_id, [], finish_reason=reason, error=error))

    def _set_status(self, status: EngineStatus) -> None:
        self._status = status
        # Whoever waits on the event that is replaced here wakes up and looks at the status anew.
        self._status_changed.set()
        self._status_changed = asyncio.Event()
        for listener in self._status_listeners:
            listener(status)
