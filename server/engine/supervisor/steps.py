"""The steps of a start, as people and monitors see them: "3/6 starting the engine, 12 s"."""

from __future__ import annotations

import time
from collections.abc import Callable

from server.engine.supervisor.base import EngineStatus

STEPS = 6
_NUMBERS = {
    "starting": 1,
    "fetching": 1,
    "unpacking": 1,
    "converting": 2,
    "the embedded model": 2,
    "starting the engine": 3,
    "loading": 4,
    "quantizing": 4,
    "making": 4,
    "draft model": 4,
    "waiting": 4,
    "preparing": 5,
    "compiling": 5,
    "capturing": 5,
    "loading the tokenizer": 6,
    "starting the other": 6,
}
"""The number of a stage's step, by what the stage begins with; the longest such text counts."""


class StartSteps:
    """Progress of a start. A step's number never falls; one that is passed over is one that had nothing to do."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """now: in seconds."""
        self._now = now
        self._began = now()
        self.number = 1
        """Of the step, from 1 to STEPS."""
        self.stage = ""

    def note(self, status: EngineStatus) -> None:
        """Take a change of the server's status."""
        if status.state not in ("loading", "restarting"):
            self.number, self.stage = 1, ""
        elif status.stage and status.stage != self.stage:
            known = max((text for text in _NUMBERS if status.stage.startswith(text)), key=len, default="")
            self.number = max(self.number, _NUMBERS.get(known, self.number))
            self.stage, self._began = status.stage, self._now()

    @property
    def seconds(self) -> float:
        """Seconds that the stage has taken so far."""
        return self._now() - self._began

    def __str__(self) -> str:
        return f"{self.number}/{STEPS} {self.stage}, {self.seconds:.0f} s"
