"""Target of Ray's HTTP proxies: it reads the body, chooses a replica by it, and passes the answer on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import ray
from grpc import RpcError
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.api.http.errors import ApiError, unavailable
from server.api.http.streaming import error_event
from server.ray_serve.affinity import beginnings
from server.ray_serve.answers import ConnectionLostError, Destination, Item, Receiver
from server.ray_serve.engine import Request

logger = logging.getLogger(__name__)

# A replica that dies before it has answered anything: the request is sent to another.
TRIES = 3
# How long Ray may look for a replica that takes a request: there may be none yet, or none with room.
ACCEPTED_S = 10.0
# The end of a call and the last messages come by different ways.
LAST_MESSAGES_S = 5.0


class NoEndError(Exception):
    """A replica's call has ended, and its answer has not."""


# RpcError: how a call by gRPC ends that its replica cancels, being at its own end.
LOST = (RayActorError, DeploymentUnavailableError, NoEndError, ConnectionLostError, RpcError)


class Ingress:
    """An ASGI application in front of the Engine deployment's handle."""

    def __init__(self, engines: DeploymentHandle, max_body_bytes: int) -> None:
        # The one that was bound calls by the transport that the process which built the application would take.
        self._engines = DeploymentHandle(engines.deployment_name, engines.app_name)
        self._stream = self._engines.options(stream=True)
        self._max_body_bytes = max_body_bytes
        self._receiver = Receiver(ray.util.get_node_ip_address())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        answer = Answer(send)
        scope = _without_prefix(scope)
        try:
            if scope["path"] == "/metrics" and scope["method"] in ("GET", "HEAD"):
                await Response(await self._metrics(), media_type="text/plain; version=0.0.4")(scope, receive, send)
                return
            body = await self._read(HttpRequest(scope, receive))
            await self._relay(_portable(scope), body, answer)
        except ClientDisconnect:
            return
        except ApiError as e:
            await answer.fail(e, anthropic=scope["path"].startswith("/v1/messages"))

    async def _read(self, request: HttpRequest) -> bytes:
        """The whole body; one that is too large goes on one byte too long, so that the replica refuses it as usual."""
        body = bytearray()
        async for part in request.stream():
            if len(body) <= self._max_body_bytes:
                body += part
        return bytes(body[: self._max_body_bytes + 1])

    async def _relay(self, scope: dict[str, Any], body: bytes, answer: Answer) -> None:
        """Pass a replica's answer on. Raises ApiError when replicas are lost, or none can take it."""
        blocks = beginnings(body)
        address = await self._receiver.address()
        for left in reversed(range(TRIES)):
            try:
                with self._receiver.expect() as (number, items):
                    await self._relay_once(Request(scope, body, Destination(address, number)), blocks, items, answer)
                return
            except TimeoutError as e:
                raise unavailable("No replica is ready to answer.", "no_replica", 5) from e
            except LOST as e:
                logger.warning("a replica was lost: %s", type(e).__name__)
                if answer.begun:
                    raise unavailable("The replica that was answering is gone.", "replica_lost") from e
                if not left:
                    raise unavailable("No replica could answer.", "replica_lost", 5) from e
            except BackPressureError as e:
                raise unavailable("All replicas are busy.", "queue_full") from e
            except RayServeException as e:
                raise unavailable(f"Ray Serve could not pass the request on: {e}", "replica_lost") from e
            except OSError as e:
                raise unavailable(f"A replica could not send its answer: {e}", "replica_lost") from e

    async def _relay_once(
        self, request: Request, blocks: tuple[bytes, ...], items: asyncio.Queue[Item], answer: Answer
    ) -> None:
        call = self._stream.answer.remote(request, blocks)
        watch: asyncio.Task[None] | None = None
        try:
            # The one that comes says that a replica has the request.
            await asyncio.wait_for(anext(call), ACCEPTED_S)
            watch = asyncio.create_task(_watch(call, items), name="watch a call")
            while (item := await items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                await answer.send(item)
            await watch
        finally:
            if watch is None or not watch.done():
                call.cancel()
            if watch is not None:
                watch.cancel()

    async def _metrics(self) -> bytes:
        """The metrics of all replicas, with the label replica. Raises ApiError while there is none, or one is lost."""
        try:
            asked = self._engines.broadcast("metrics").results_async()
            replies: list[tuple[str, bytes]] = await asyncio.wait_for(asked, ACCEPTED_S)
        except (TimeoutError, RayActorError, RayServeException) as e:
            raise unavailable("Not all replicas have told their metrics.", "no_replica", 5) from e
        return generate_latest(_Merged(replies))


async def _watch(call: DeploymentResponseGenerator[None], items: asyncio.Queue[Item]) -> None:
    """Wait for the end of a call; what ends it otherwise goes into items, as does the lack of an answer's end after it."""
    try:
        async for _ in call:
            pass
    except Exception as e:
        items.put_nowait(e)
        return
    asyncio.get_running_loop().call_later(LAST_MESSAGES_S, items.put_nowait, NoEndError())


class Answer:
    """State of an answer to the client, which can end with an error wherever it is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self._events = False

    async def send(self, message: Message) -> None:
        """Pass one message on."""
        if message["type"] == "http.response.start":
            self.begun = True
            self._events = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message["headers"]
            )
            # Ray's proxy says it, too, with the same id: it hands ours, or the client's, to all.
            headers = [(name, value) for name, value in message["headers"] if name.lower() != b"x-request-id"]
            message = {**message, "headers": headers}
        await self._send(message)

    async def fail(self, error: ApiError, *, anthropic: bool) -> None:
        """Report an error: as the whole answer, as a stream's last event, or by ending a body of known length early."""
        if not self.begun:
            response = error.response(anthropic=anthropic)
            start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
            await self._send(start)
            await self._send({"type": "http.response.body", "body": response.body})
            return
        if self._events:
            event = error_event(error, anthropic=anthropic)
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
            return
        raise error


class _Merged(Collector):
    def __init__(self, replies: list[tuple[str, bytes]]) -> None:
        self._replies = replies

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, body in sorted(self._replies):
            for family in text_string_to_metric_families(body.decode()):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples
                ]
        yield from families.values()


def _without_prefix(scope: Scope) -> Scope:
    """The scope as if the application's route prefix were "/", which is how a replica knows its paths."""
    prefix = scope.get("root_path", "")
    path, raw_path = scope["path"].removeprefix(prefix), scope["raw_path"].removeprefix(prefix.encode())
    return {**scope, "root_path": "", "path": path or "/", "raw_path": raw_path or b"/"}


def _portable(scope: Scope) -> dict[str, Any]:
    """Part of a request's scope that means something in another process."""
    names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
    return {name: scope[name] for name in names if name in scope} | {
        "headers": [(bytes(name), bytes(value)) for name, value in scope["headers"]],
        "client": tuple(scope["client"]) if scope.get("client") else None,
        "server": tuple(scope["server"]) if scope.get("server") else None,
    }


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
