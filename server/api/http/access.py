"""Who may ask: API keys, and how many requests each may have under way."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.http.counts import FIRST_KEY, Counts
from server.api.http.errors import ApiError, answer_api_error

# Machines and people look at these before they have a key; none of them tells what others ask.
OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/metrics", "/docs", "/openapi.json"})
# What the pages are made of; its route answers a list of files and nothing else.
OPEN_FOLDER = "/static/"
MAX_KEYS = 8
"""Keys of a request that are looked at, at most."""


class AccessLayer:
    """ASGI middleware: 401 without a known key, 429 for a key with too many requests under way."""

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], most_per_key: int | None, counts: Counts | None = None
    ) -> None:
        """counts: those that all API processes share; None where this one is the only one."""
        self._app = app
        # Digests have one length, so that a comparison tells nothing about a key's.
        self._digests = [_digest(key.encode()) for key in keys]
        self._most = most_per_key
        self._counts = counts or Counts(len(keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand one request on, or answer it."""
        if scope["type"] != "http" or not self._digests or scope["method"] == "OPTIONS" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        try:
            key = self._known(scope)
            self._begin(key)
        except ApiError as e:
            response = await answer_api_error(Request(scope), e)
            await response(scope, receive, send)
            return
        scope.setdefault("state", {})["api_key"] = key
        place = contextlib.ExitStack()
        place.callback(self._counts.add, FIRST_KEY + key, -1)

        async def sending(message: Message) -> None:
            # Whoever has read the end of an answer may ask again at once, before the rest here has run.
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                place.close()
            await send(message)

        with place:
            await self._app(scope, receive, sending)

    def _begin(self, key: int) -> None:
        """Count a request of a key. Raises ApiError where it has too many under way."""
        with self._counts.locked():
            if self._most is not None and self._counts.total(FIRST_KEY + key) >= self._most:
                raise ApiError(
                    429,
                    f"This API key has {self._most} requests under way, which is its limit.",
                    type="rate_limit_error",
                    code="key_limit",
                    headers={"Retry-After": "1"},
                )
            self._counts.add(FIRST_KEY + key, 1)

    def _known(self, scope: Scope) -> int:
        """The index of a key that the request shows; one that is known is enough. Raises ApiError."""
        given = _given_keys(scope)
        if not given:
            raise _refused("No API key was given; send it as 'Authorization: Bearer KEY'.")
        found = -1
        for key in given:
            digest = _digest(key)
            for i, known in enumerate(self._digests):
                if hmac.compare_digest(known, digest):
                    found = i  # and on through the rest: the time must not tell which key it was
        if found < 0:
            raise _refused("The API key is not known.")
        return found


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _given_keys(scope: Scope) -> list[bytes]:
    """The keys in Authorization (OpenAI's clients), x-api-key (Anthropic's) and api-key (Azure's).

    Clients that serve several APIs send one to each place, of which some are other servers'.
    """
    keys = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            keys.append(value[7:] if value[:7].lower() == b"bearer " else value)
        elif name in (b"x-api-key", b"api-key"):
            keys.append(value)
    return [bytes(key.strip()) for key in keys[:MAX_KEYS]]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refused(message: str) -> ApiError:
    return ApiError(
        401, message, type="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
    )
