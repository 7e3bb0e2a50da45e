"""Images within texts: the mark that stands for one until the chat template has made its own placeholder of it."""

from __future__ import annotations

from typing import Any

IMAGE = "\U000ffff2"
"""A private-use character, which conversations put in the place of an image; clients' own are dropped."""


def without_marks(text: str) -> str:
    """A client's text without marks."""
    return text.replace(IMAGE, "") if IMAGE in text else text


def in_parts(text: str) -> list[dict[str, Any]]:
    """A content with images as the parts that chat templates take."""
    parts: list[dict[str, Any]] = []
    for index, piece in enumerate(text.split(IMAGE)):
        if index:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts
