"""Requests that only the first API process can answer: another passes them on, and the first's application answers them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api_processes.link import Answer, Ask, Link

PATHS = frozenset({"/metrics", "/get_load", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Paths whose answers are about all processes or the engine's state, or that change what all processes have to know."""

_Passing = Callable[[Ask], Awaitable[Answer]]


class RelayLayer:
    """ASGI middleware, the outermost: requests for PATHS are passed on with their keys, which are checked there."""

    def __init__(self, app: ASGIApp, ask: _Passing, max_body_bytes: int) -> None:
        """ask: sends a request, with any number, to the first process."""
        self._app = app
        self._ask = ask
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            async for part in Request(scope, receive).stream():
                if (
                    len(body) <= self._max_body_bytes
                ):  # a body with one byte too many is refused like any that is too large
                    body += part
        except ClientDisconnect:
            return
        answered = await self._ask(
            Ask(
                number=0,
                method=scope["method"],
                path=scope["path"],
                query=scope["query_string"],
                headers=[(bytes(name), bytes(value)) for name, value in scope["headers"]],
                body=bytes(body[: self._max_body_bytes + 1]),
                scheme=scope["scheme"],
                client=tuple(scope["client"]) if scope.get("client") else None,
            )
        )
        await send({"type": "http.response.start", "status": answered.status, "headers": answered.headers})
        await send({"type": "http.response.body", "body": answered.body})


async def answer(app: ASGIApp, ask: Ask, link: Link[Any]) -> None:
    """Have an application answer a request that another process passed on, and send the answer there."""
    body: list[Message] = [{"type": "http.request", "body": ask.body, "more_body": False}]
    status, headers, parts = 500, [], []

    async def receive() -> Message:
        return body.pop() if body else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], [(bytes(name), bytes(value)) for name, value in message["headers"]]
        else:
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": ask.method,
        "scheme": ask.scheme,
        "path": ask.path,
        "raw_path": ask.path.encode(),
        "query_string": ask.query,
        "root_path": "",
        "headers": ask.headers,
        "client": ask.client,
        "server": None,
        "state": {},
    }
    try:
        await app(scope, receive, send)
    finally:
        link.send(Answer(ask.number, status, headers, b"".join(parts)))
