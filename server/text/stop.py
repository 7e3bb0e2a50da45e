"""Stop strings, found across token boundaries; no character that may belong to one is sent too early."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


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
        """Give what was held back, if the text ends without a match."""
        held, self._held = self._held, ""
        return held


class SpecialStops:
    """Stop strings with special tokens in them that leave no text: each such token counts as one character of its own."""

    _FIRST = 0xF0000  # in a plane for private use

    def __init__(self, stops: Sequence[str], hidden: Mapping[str, int], *, include: bool = False) -> None:
        """hidden: special tokens that leave no text, and their ids."""
        names = sorted(filter(None, hidden), key=len, reverse=True)
        found = re.compile("|".join(map(re.escape, names)) or "(?!)")
        used = dict.fromkeys(name for stop in stops for name in found.findall(stop))
        marks = {name: chr(self._FIRST + i) for i, name in enumerate(used)}
        self._marks = {hidden[name]: mark for name, mark in marks.items()}
        self._originals = {found.sub(lambda name: marks[name[0]], stop): stop for stop in stops if found.search(stop)}
        self._unmarked = str.maketrans("", "", "".join(marks.values()))
        self._stops = StopStrings(tuple(self._originals), include=include)

    @property
    def matched(self) -> str | None:
        """The stop string that was found, as it was given."""
        return None if self._stops.matched is None else self._originals[self._stops.matched]

    def push(self, text: str, token_id: int | None = None) -> str:
        """Text that may be sent now; token_id: the token that this text is of."""
        if not self._stops.active:
            return text
        mark = "" if token_id is None else self._marks.get(token_id, "")
        return self._stops.push(text + mark).translate(self._unmarked)

    def release(self) -> str:
        """Give what was held back, if the text ends without a match."""
        return self._stops.release().translate(self._unmarked)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that a stop string starts with."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
