"""HEAD wherever GET is: what monitors and browsers ask to see whether an address is there."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadLayer:
    """ASGI middleware: answer HEAD as GET, with the head alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand one request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        # A copy: the server looks at its own scope to know that no body follows.
        await self._app({**scope, "method": "GET"}, receive, send_head)
