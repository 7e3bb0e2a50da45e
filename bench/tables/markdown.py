"""Markdown that tables of results are made of."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def wrapped(text: str, bullet: str = "") -> str:
    """Text in lines of 125 characters, as an entry of a list where there is a bullet."""
    return textwrap.fill(text, 125, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_on_hyphens=False)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))
