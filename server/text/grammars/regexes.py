"""Regular expressions in JSON schemas, written so that llguidance keeps to them.

llguidance (1.9) writes the characters as JSON does, and for a class with all control characters takes every escape
at once: [^"] then lets \\" through. A class that leaves out one control character is written character by
character, so U+0001 is taken out of negated classes, in which nobody wants it. Its \\d and \\w are Unicode's; JSON Schema's
are ECMAScript's, which are ASCII.
"""

from __future__ import annotations

_ASCII = {r"\d": "0-9", r"\w": "0-9A-Za-z_"}


def mend_regex(pattern: str) -> str:
    """The regular expression with ASCII \\d and \\w, and with U+0001 taken out of its negated classes."""
    parts: list[str] = []
    inside = False
    place = 0
    while place < len(pattern):
        taken = pattern[place]
        if taken == "\\":
            escaped = taken = pattern[place : place + 2]
            if escaped in _ASCII:
                taken = _ASCII[escaped] if inside else f"[{_ASCII[escaped]}]"
            parts.append(taken)
            place += len(escaped)
            continue
        if inside:
            inside = taken != "]"
        elif pattern.startswith("[^", place) and not pattern.startswith("[^]", place):
            taken, inside = "[^", True
            parts.append("[^\\x01")
            place += len(taken)
            continue
        elif taken == "[":
            inside = True
        parts.append(taken)
        place += len(taken)
    return "".join(parts)
