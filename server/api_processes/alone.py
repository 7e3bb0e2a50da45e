"""The part of an API process that is the only one: it has the engine to itself.

Where there are several, subclasses override it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI

from server.api.http.counts import Counts
from server.checkpoint.adapter_files import check_adapter
from server.checkpoint.source import resolve_checkpoint
from server.config import Config
from server.engine.supervisor.base import EngineBase
from server.engine.supervisor.child import Child
from server.engine.supervisor.client import EngineClient
from server.threads import in_thread

if TYPE_CHECKING:
    from server.api.answering.service import Service
    from server.observability.many_processes import Processes

Progress = Callable[[str, float], None]


class Alone:
    """An API process' engine, and its counts and metrics, which may be shared with others."""

    def __init__(self, config: Config, child: Child | None = None) -> None:
        """child: the process for the first engine, if it has been started."""
        self._config = config
        self._child = child
        self.counts = self._make_counts(len(config.http.keys()))
        self.processes: Processes | None = None
        """All processes whose metrics are added up; None: this one's alone."""

    def _make_counts(self, keys: int) -> Counts:
        return Counts(keys)

    async def begin(self, service: Service, app: FastAPI) -> None:
        """Called when the application starts."""

    async def engine(self, progress: Progress) -> tuple[Path, EngineBase]:
        """The checkpoint's folder, and the engine, not started. Raises CheckpointError.

        Adapters' folders are checked first, as fetching and loading the model may take long.
        """
        config = self._config
        for module in config.engine.lora_modules:
            check_adapter(module.path)
        folder = await in_thread(lambda: resolve_checkpoint(config.model, config.cache_dir, progress))
        return folder, EngineClient(await _with_draft_model(config, progress), folder, self._child)

    async def start(self, engine: EngineBase) -> None:
        """Start the engine, once all its listeners have been added."""
        assert isinstance(engine, EngineClient)
        await engine.start()

    async def settle(self, service: Service) -> None:
        """Called when this process has all that it needs; waits until all processes take connections."""

    async def end(self) -> None:
        """Called when the application ends, before the engine is stopped."""


async def _with_draft_model(config: Config, progress: Progress) -> Config:
    """The configuration with the folder of its draft model, if it has one. Raises CheckpointError."""
    wanted = config.engine.draft_model
    if wanted is None:
        return config
    folder = await in_thread(lambda: resolve_checkpoint(wanted, config.cache_dir, progress))
    return config.model_copy(update={"engine": config.engine.model_copy(update={"draft_model": str(folder)})})
