"""Streaming pieces, put together, are the whole text; no piece shows half a character."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.detokenizer import REPLACEMENT
from server.text.tokenizer import Tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def pieces(tokenizer: Tokenizer, ids: list[int], *, step: int = 1, **options: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)
    parts = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*parts, detokenizer.flush()]


@given(text=TEXTS, step=st.integers(1, 5))
@settings(deadline=None)
def test_byte_level_text_survives(byte_level: Tokenizer, text: str, step: int) -> None:
    ids = byte_level.encode(text)
    parts = pieces(byte_level, ids, step=step)
    whole = byte_level.decode(ids)
    assert "".join(parts) == whole
    # This vocabulary lacks some control characters and the first bytes of unassigned planes.
    assert whole == text or any(byte_level.decode(byte_level.encode(character)) != character for character in text)
    assert REPLACEMENT in whole or not any(REPLACEMENT in part for part in parts)


@given(ids=st.lists(st.integers(0, 49151), max_size=40), step=st.integers(1, 5), skip=st.booleans())
@settings(deadline=None)
def test_byte_level_any_tokens(byte_level: Tokenizer, ids: list[int], step: int, skip: bool) -> None:
    """Also for sequences that are not UTF-8, and with special tokens in the middle of characters."""
    parts = pieces(byte_level, ids, step=step, skip_special_tokens=skip)
    assert "".join(parts) == byte_level.decode(ids, skip_special_tokens=skip)


@given(text=TEXTS.filter(lambda text: "▁" not in text), step=st.integers(1, 5))
@settings(deadline=None)
def test_byte_fallback_text_survives(byte_fallback: Tokenizer, text: str, step: int) -> None:
    ids = byte_fallback.encode(text)
    parts = pieces(byte_fallback, ids, step=step)
    assert "".join(parts) == byte_fallback.decode(ids)
    assert "".join(parts) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in part for part in parts)


def test_continuation_keeps_its_leading_space(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("the")
    assert "".join(pieces(byte_fallback, ids, at_start=False)) == " the"
    assert "".join(pieces(byte_fallback, ids, at_start=True)) == "the"


def test_only_special_added_tokens_are_skipped(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("<think>a</s>")
    assert "".join(pieces(byte_fallback, ids, at_start=False)) == "<think>a"
    assert "".join(pieces(byte_fallback, ids, skip_special_tokens=False, at_start=False)) == "<think>a</s>"


def test_unfinished_character_appears_at_the_end_only(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀")
    detokenizer = byte_level.detokenizer()
    assert "".join(detokenizer.push([i]) for i in ids[:-1]) == "a"
    assert detokenizer.flush() == REPLACEMENT


def test_ids_outside_the_vocabulary_are_nothing(byte_level: Tokenizer) -> None:
    assert "".join(pieces(byte_level, [10**6, -1, *byte_level.encode("x")])) == "x"


@given(ids=st.lists(st.integers(0, 7), max_size=30), step=st.integers(1, 4))
@settings(deadline=None)
def test_other_tokenizers_decode_through_a_window(word_pieces: Tokenizer, ids: list[int], step: int) -> None:
    assert word_pieces.vocabulary.kind == "other"
    assert "".join(pieces(word_pieces, ids, step=step)) == word_pieces.decode(ids)


def test_cost_per_token_does_not_grow(byte_level: Tokenizer) -> None:
    """20000 tokens in well under a second; a decoder that starts over at each token would take minutes."""
    ids = byte_level.encode("naïve 日本語 text ")
    sequence = (ids * (20_000 // len(ids) + 1))[:20_000]
    started = time.process_time()
    pieces(byte_level, sequence)
    assert time.process_time() - started < 5.0
