"""Stop strings, found across token boundaries; no character that may belong to one is sent too early."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text through until one of the stop strings is complete.

    The match that ends first counts (of those, the longest), so the result does not depend on how the text was cut.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; push returns nothing more after it."""

    @property
    def active(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._stops)

    def push(self, text: str) -> str:
        """Text that may be sent now."""
        if not self._stops:
            return text
        if self.matched is not None or not text:
            return ""
        buffer = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return buffer[: end if self._include else start]
        keep = len(buffer) - max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[keep:]
        return buffer[:keep]

    def release(self) -> str:
        """What was held back, when the text ends without a match."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that a stop string starts with."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
