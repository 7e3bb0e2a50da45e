"""A process that has imported what an engine needs and waits to become the next one: more than half of a start on CPU."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from server.config import Config
from server.engine.supervisor.process import start_child

logger = logging.getLogger(__name__)

END_GRACE_S = 1.0


class Standby:
    """At most one such process. Without one, or when it has died, an engine just takes longer to start."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._child: asyncio.subprocess.Process | None = None

    async def prepare(self, device: str) -> None:
        """Start one, where the configuration wants it beside an engine on this device and there is none."""
        wanted = self._config.engine.standby
        # On a GPU the imports alone (bitsandbytes asks what it can do) would take hundreds of MB of its memory.
        if not (device == "cpu" if wanted is None else wanted):
            return
        if self._child is not None and self._child.returncode is None:
            return
        try:
            self._child = await start_child(self._config, standby=True)
        except OSError as e:
            logger.warning("no engine stands by: %s", e)

    def take(self) -> asyncio.subprocess.Process | None:
        """The process, which is the caller's from here on; None where none is alive."""
        child, self._child = self._child, None
        return child if child is not None and child.returncode is None else None

    async def end(self) -> None:
        """End the process, if there is one."""
        child = self.take()
        if child is None:
            return
        if child.stdin is not None:
            child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), END_GRACE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
