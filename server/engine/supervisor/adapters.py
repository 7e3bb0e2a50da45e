"""The LoRA adapters that an engine has, as the API process knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

from server.config import LoraModule
from server.types import AdapterResult, LoadAdapter


class AdapterError(Exception):
    """The engine does not load this adapter; the message is one line."""


class AdapterList:
    """Adapters that requests may name, and those that are being loaded. Use from one event loop only."""

    def __init__(self, configured: Iterable[LoraModule]) -> None:
        self._configured = [LoadAdapter(module.name, str(module.path)) for module in configured]
        self._loaded = {adapter.name: adapter for adapter in self._configured}
        self._loading: dict[str, asyncio.Future[AdapterResult]] = {}

    @property
    def folders(self) -> dict[str, str]:
        """Folders of the adapters, by name."""
        return {name: request.path for name, request in self._loaded.items()}

    @property
    def changed(self) -> list[LoadAdapter]:
        """Adapters that an engine has to load, besides the configured ones, to have all of them."""
        return [adapter for adapter in self._loaded.values() if adapter not in self._configured]

    async def load(self, request: LoadAdapter, send: Callable[[LoadAdapter], None]) -> None:
        """Send a request to the engine and wait for its answer. Raises AdapterError."""
        name = request.name
        if name in self._loading:
            raise AdapterError(f"an adapter {name!r} is being loaded")
        self._loading[name] = asyncio.get_running_loop().create_future()
        try:
            send(request)
            result = await self._loading[name]
        finally:
            del self._loading[name]
        if result.error is not None:
            raise AdapterError(result.error)
        self._loaded[name] = request

    def answered(self, result: AdapterResult) -> None:
        """Take the engine's answer to a request to load."""
        loading = self._loading.get(result.name)
        if loading is not None and not loading.done():
            loading.set_result(result)

    def engine_ended(self, error: str) -> None:
        """Let those who wait for a load go on; the next engine has yet to load their adapters."""
        for name in self._loading:
            self.answered(AdapterResult(name, error))

    def forget(self, name: str) -> bool:
        """Whether there was an adapter of this name."""
        return self._loaded.pop(name, None) is not None

    def engine_began(self, names: Collection[str]) -> set[str]:
        """A new engine has adapters of these names; some may be lost. Returns those that nobody wants any more."""
        self._loaded = {name: adapter for name, adapter in self._loaded.items() if name in names}
        return set(names) - set(self._loaded)
