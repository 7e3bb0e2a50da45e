"""Looking for markers in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable


def overlap(text: str, marker: str) -> int:
    """Length of the longest proper prefix of marker that text ends with."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def split_at(text: str, markers: Iterable[str]) -> tuple[str, str | None, str]:
    """(what is before the first marker, the marker or None, the rest).

    Without a marker, the rest is the end of text that may begin one.
    """
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, _, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    held = max((overlap(text, marker) for marker in markers), default=0)
    return text[: len(text) - held], None, text[len(text) - held :]
