"""Responses kept in memory, so that a later request can go on from one: http.response_store of them at most."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from server.api.http.errors import ApiError

MAX_BYTES = 256 * 2**20
"""Bytes that all kept responses may take together, as JSON."""


@dataclass(frozen=True)
class StoredResponse:
    """One response: the items that led to it, its own among them, and the document that its client got."""

    items: list[Any]
    document: dict[str, Any]
    size: int


class ResponseStore:
    """Responses by API key and id; a key finds only its own. Where there are too many, the oldest are dropped."""

    def __init__(self, limit: int, max_bytes: int = MAX_BYTES) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[tuple[int | None, str], StoredResponse] = OrderedDict()

    def keep(self, key: int | None, asked: list[Any], document: dict[str, Any]) -> None:
        """Keep a response; asked: the items of its request, with those of the response that it went on from."""
        items = [*asked, *document["output"]]
        size = len(msgspec.json.encode([items, document]))
        if size > self._max_bytes:
            return
        self._kept[key, document["id"]] = StoredResponse(items, document, size)
        self._bytes += size
        while len(self._kept) > self._limit or self._bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size

    def find(self, key: int | None, name: str, param: str | None) -> StoredResponse:
        """A kept response. Raises ApiError: 404, or 400 where the request names it in param."""
        found = self._kept.get((key, name))
        if found is None:
            raise ApiError(
                404 if param is None else 400,
                f"Response with id {name[:100]!r} not found; this server keeps a limited number of them in memory.",
                param=param,
                code="not_found" if param is None else "previous_response_not_found",
            )
        return found

    def forget(self, key: int | None, name: str) -> None:
        """Remove a kept response. Raises ApiError (404)."""
        self._bytes -= self.find(key, name, None).size
        del self._kept[key, name]
