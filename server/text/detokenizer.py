"""Token ids to text, a step at a time: what was returned so far is always a prefix of the whole text.

Characters whose bytes are spread over several tokens come out when their last byte arrives, never as U+FFFD before.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from server.text.vocabulary import Vocabulary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that these tokens complete; may be empty."""
        ...

    def flush(self) -> str:
        """The rest at the end: U+FFFD for a character that was never completed, or nothing."""
        ...


class TokenBytes(dict[int, bytes]):
    """Bytes by token id, looked up in the vocabulary once per id; special tokens but kept count as empty where skipped."""

    def __init__(
        self, vocabulary: Vocabulary, *, skip_special_tokens: bool, kept: frozenset[int] = frozenset()
    ) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids - kept if skip_special_tokens else frozenset[int]()

    def __missing__(self, token_id: int) -> bytes:
        value = b"" if token_id in self._skipped else self._vocabulary.token_bytes(token_id)
        self[token_id] = value
        return value


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: O(1) per token, at most three bytes held back."""

    def __init__(self, table: TokenBytes, *, strip_leading_space: bool) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_leading_space

    def push(self, token_ids: Iterable[int]) -> str:
        text = self._decoder.decode(b"".join(map(self._table.__getitem__, token_ids)))
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window of the latest tokens and returns what the newest ones added.

    The window starts at a token whose text is already out, so that the tokenizer sees where words join.
    """

    # A token's text is final once this many tokens follow it, U+FFFD or not: no character is longer than 4 bytes.
    _LONGEST_HOLD = 8

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        pieces = []
        for token_id in token_ids:
            self._pending.append(token_id)
            before, after = self._texts()
            if len(after) <= len(before):
                continue
            if after.endswith(REPLACEMENT) and len(self._pending) < self._LONGEST_HOLD:
                continue
            pieces.append(after[len(before) :])
            self._context, self._pending = self._pending, []
        return "".join(pieces)

    def flush(self) -> str:
        before, after = self._texts()
        self._context, self._pending = self._pending, []
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        return self._decode(self._context), self._decode(self._context + self._pending)
