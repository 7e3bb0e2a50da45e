"""Server-sent events, and noticing at once that a client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.http.errors import ApiError, internal_error
from server.logs import request_id

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def closing(iterator: AsyncIterator[T]) -> AbstractAsyncContextManager[AsyncIterator[T]]:
    """Close an async generator when its reader leaves, whatever the reason."""
    return contextlib.aclosing(cast("AsyncGenerator[T]", iterator))


# Line ends to Python's splitlines(), by which some clients read events; in JSON they stand within strings only.
_LINE_ENDS = {character.encode(): rf"\u{ord(character):04x}".encode() for character in "\x85\u2028\u2029"}


def event(document: Any, name: str | None = None) -> bytes:
    """A document as one server-sent event (of a name)."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + _data(_encode(document))


def error_event(error: ApiError, *, anthropic: bool = False) -> bytes:
    """The last event of a stream that an error ends, in OpenAI's shape or in Anthropic's."""
    return (b"event: error\n" if anthropic else b"") + _data(error.body(anthropic=anthropic))


def _data(document: bytes) -> bytes:
    for raw, escaped in _LINE_ENDS.items():
        document = document.replace(raw, escaped)
    return b"data: " + document + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled as soon as the client has gone.

    Raises ApiError (499; nobody will read it) in that case. The request's body must have been read.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "The client closed the connection.", code="client_disconnected")
    finally:
        await _cancel(task, watcher)


class EventStream(Response):
    """A streamed answer. The events are closed, and with them the generation, when the client goes.

    An error after the answer has begun is sent as the last event, {"error": ...}, without [DONE].
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        """close is called at the end, also when events were never read (their own clean-up does not run then)."""
        # Proxies must neither keep nor gather the events.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client goes."""
        sender = asyncio.create_task(self._send(send))
        watcher = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
            else:
                scope.setdefault("state", {})["rejection"] = "client_disconnected"
        finally:
            await _cancel(sender, watcher)
            self._close()

    async def _send(self, send: Send) -> None:
        async with closing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except ApiError as e:
                logger.warning("a stream ended with an error: %s", e.message)
                await send({"type": "http.response.body", "body": error_event(e), "more_body": True})
            except Exception:
                logger.exception("a stream failed")
                failed = error_event(internal_error(request_id.get()))
                await send({"type": "http.response.body", "body": failed, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
