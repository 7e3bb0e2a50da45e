"""Bytes of each token id, read from the tokenizer's own decoder.

Byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM ...) and SentencePiece-style ones with byte fallback (Llama 2,
Mistral, Gemma, Phi 3 ...) decode token by token into bytes, so text can be streamed by feeding those bytes to a UTF-8
decoder.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Kind = Literal["byte-level", "byte-fallback", "other"]


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in character for each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(rest)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


class Vocabulary:
    """Token id to bytes, for one tokenizer of transformers.

    kind is "other" when the tokenizer's decoder does not work token by token; token_bytes then gives the token's text
    as written in the vocabulary, which serves for log-probabilities but not for streaming.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.size: int = len(tokenizer)
        self.special_ids = frozenset(
            [token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special]
            + list(tokenizer.all_special_ids)
        )
        self._added: dict[int, str] = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        self.special_ids_by_text = {self._added[i]: i for i in self.special_ids if i in self._added}
        in_brackets = {text: i for i, text in self._added.items() if text.startswith("<") and text.endswith(">")}
        self.mark_ids_by_text = in_brackets | self.special_ids_by_text
        """Tokens that are no text to llguidance: those that are special, and added ones in angle brackets."""
        self.kind, self.strips_leading_space = _decoder_kind(tokenizer)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special or not; empty for an id outside the vocabulary."""
        if not 0 <= token_id < self.size:
            return b""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return b""
        if self.kind == "byte-level":
            try:
                return bytes([_ALPHABET[character] for character in token])
            except KeyError:  # an added token, written as it is
                return token.encode()
        if token_id in self._added:
            return self._added[token_id].encode()
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()


def _decoder_kind(tokenizer: Any) -> tuple[Kind, bool]:
    """Kind of the decoder, and whether it drops one space at the very start of a text."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return "other", False
    state = json.loads(decoder.__getstate__())
    stages = state["decoders"] if state["type"] == "Sequence" else [state]
    names = [stage["type"] for stage in stages]
    if names == ["ByteLevel"]:
        return "byte-level", False
    if "ByteFallback" not in names:
        return "other", False
    strips = False
    for stage in stages:
        match stage:
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                pass
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strips = start == 1
            case _:
                return "other", False
    return "byte-fallback", strips
