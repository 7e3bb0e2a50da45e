"""Special tokens that a client writes into a message are text: only the chat template's own are tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

# Private-use characters around a special token's text; a client's own are dropped, so that none can be forged.
_START, _END = "\U000ffff0", "\U000ffff1"
_LONE = re.compile(f"[{_START}{_END}]")

Encode = Callable[[str], list[int]]


class SpecialTextGuard:
    """Marks special tokens in a client's strings before a template joins them, and encodes the joined text."""

    def __init__(self, special_tokens: Iterable[str], marks: Iterable[str] = ()) -> None:
        """marks: other tokens that mean something to the model, which are text in what users and tools say."""
        special = frozenset(special_tokens)
        self._special = re.compile(_any_of(special))
        found = _any_of(special.union(marks))
        self._all = re.compile(found)
        self._marked = re.compile(f"{_START}({found}){_END}|{_LONE.pattern}")

    def mark(self, value: Any, *, marks: bool = False) -> Any:
        """A value of JSON with every special token in its strings (not in keys) marked, and the other marks if asked to."""
        match value:
            case str():
                found = self._all if marks else self._special
                return found.sub(f"{_START}\\g<0>{_END}", _LONE.sub("", value))
            case dict():
                return {key: self.mark(inner, marks=marks) for key, inner in value.items()}
            case list() | tuple():
                return [self.mark(inner, marks=marks) for inner in value]
        return value

    @staticmethod
    def is_marked(text: str) -> bool:
        """Whether there is a mark in a text."""
        return _LONE.search(text) is not None

    @staticmethod
    def places(text: str, token: str) -> int:
        """Count a token in a marked text that no client has written."""
        return len(_own(token).findall(text))

    @staticmethod
    def replaced(text: str, token: str, texts: Iterable[str]) -> str:
        """A marked text with texts, one after another, in the places() of a token."""
        left = iter(texts)
        return _own(token).sub(lambda _: next(left), text)

    @staticmethod
    def plain(text: str) -> str:
        """The text without marks."""
        return _LONE.sub("", text)

    def encode(self, text: str, encode: Encode, encode_plain: Encode) -> list[int]:
        """Ids of a marked text; encode_plain takes special tokens for text."""
        # Odd pieces are marked tokens, None where a template's string functions have separated a token's marks.
        pieces = self._marked.split(text)
        ids = encode(pieces[0])
        for i, piece in enumerate(pieces[1:], start=1):
            if piece:
                ids += _continued(piece, encode_plain if i % 2 else encode)
        return ids


def _any_of(tokens: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))) or "(?!)"


def _own(token: str) -> re.Pattern[str]:
    return re.compile(f"(?<!{_START}){re.escape(token)}")


def _continued(piece: str, encode: Encode) -> list[int]:
    """Ids of a piece within a text. SentencePiece puts a space before a first word; here a line end takes it."""
    line_end = encode("\n")
    ids = encode("\n" + piece)
    return ids[len(line_end) :] if line_end and ids[: len(line_end)] == line_end else encode(piece)
