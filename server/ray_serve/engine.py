"""A replica: our whole ASGI application with an engine process of its own, asked by method calls instead of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import ray
from fastapi import FastAPI

from server.app import create_app
from server.command_line import keep_torch_out
from server.config import Config
from server.engine.supervisor.base import EngineStatus
from server.logs import set_up_logging
from server.ray_serve.answers import Destination, Message, Sender

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """An HTTP request with its whole body: what ASGI's scope has of it, and where the answer goes."""

    scope: dict[str, Any]
    body: bytes
    destination: Destination


class Engine:
    """The deployment's class. A replica is started when its model can generate, and healthy while that may come back."""

    async def __init__(self, config: dict[str, Any]) -> None:  # type: ignore[misc] # Serve awaits it
        """config: Config, dumped. Raises RuntimeError with one line, Serve's status, when the model cannot be started."""
        settings = with_assigned_cores(Config.model_validate(config))
        set_up_logging(settings.log_level, settings.log_format)
        # Serve's worker process is this replica's alone.
        keep_torch_out()
        if (niceness := os.getpriority(os.PRIO_PROCESS, 0)) > 0:
            logger.info(
                "Ray runs this replica at niceness %d; RAY_worker_niceness=0 where Ray is started is 0", niceness
            )
        settled = asyncio.Event()

        def on_status(status: EngineStatus) -> None:
            if status.state in ("ready", "failed"):
                settled.set()

        self._app: FastAPI = create_app(settings, on_status)
        self._service = self._app.state.service
        self._sender = Sender()
        self._lifespan = contextlib.AsyncExitStack()
        await self._lifespan.enter_async_context(self._app.router.lifespan_context(self._app))
        await settled.wait()
        if self._service.status.state == "failed":
            message = self._service.status.message
            await self._lifespan.aclose()
            raise RuntimeError(f"{settings.model_name}: {message}")

    async def check_health(self) -> None:
        """Asked by Serve, which replaces the replica when this raises. An engine that died is started again in here."""
        status = self._service.status
        if status.state in ("failed", "stopped"):
            raise RuntimeError(f"the engine is {status.state}: {status.message}")

    async def answer(self, request: Request, beginnings: tuple[bytes, ...] = ()) -> AsyncIterator[None]:
        """Answer a request: its ASGI messages go to request.destination; beginnings are for the router.

        One None comes at once: it tells the ingress that the request has arrived. The end comes when all is sent.
        Ray cancels this when the client is gone, which ends the request in the engine.
        """
        destination = request.destination
        connection = await self._sender.connection(destination.address)
        connection.put(destination.number, {})
        yield None
        body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await asyncio.Future()  # until this is cancelled
            raise AssertionError

        async def send(message: Message) -> None:
            connection.put(destination.number, message)
            await connection.drain()

        await self._app({**request.scope, "state": {}}, receive, send)
        connection.put(destination.number, None)

    async def metrics(self) -> tuple[str, bytes]:
        """This replica's id, and its metrics in Prometheus' text format."""
        body, _ = self._service.metrics.exposition("")
        return ray.serve.get_replica_context().replica_id.unique_id, body

    async def __del__(self) -> None:
        """Serve's call when no request is left, or the time for that is over: the engine process ends."""
        if lifespan := getattr(self, "_lifespan", None):
            await lifespan.aclose()
            await self._sender.close()


def with_assigned_cores(config: Config) -> Config:
    """On CPU as many threads as the replica was given cores, unless the configuration says how many."""
    resources = ray.get_runtime_context().get_assigned_resources()
    cores = int(resources.get("CPU", 0))
    if config.engine.threads is not None or cores < 1 or resources.get("GPU"):
        return config
    return config.model_copy(update={"engine": config.engine.model_copy(update={"threads": cores})})
