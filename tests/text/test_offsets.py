"""Offsets of text completions' log-probabilities: where in the text each token begins, whatever it is a part of."""

from __future__ import annotations

import pytest

from server.api.openai.logprobs import CompletionLogprobsBuilder
from server.text.tokenizer import Tokenizer
from server.types import TokenLogprob

TEXTS = ("a😀é日b", "Hé 😀 ok", "the thé", " the", "日本語")


def scored(ids: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, -1.0) for token_id in ids]


def check(tokenizer: Tokenizer, text: str, ids: list[int], offsets: list[int]) -> None:
    """Each token's bytes, from the beginning of the character that they are in, are those of the text."""
    assert len(offsets) == len(ids)
    done = b""
    for token_id, offset in zip(ids, offsets, strict=True):
        assert offset == len(done.decode("utf-8", "ignore"))
        if token_id not in tokenizer.vocabulary.special_ids or text.encode()[len(done) :].startswith(
            tokenizer.token_bytes(token_id)
        ):
            done += tokenizer.token_bytes(token_id)
    assert done.decode() == text


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_are_in_characters_of_the_text(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    whole = CompletionLogprobsBuilder(byte_level).build(scored(ids), text, last=True)
    check(byte_level, text, ids, whole.text_offset)
    builder, detokenizer = CompletionLogprobsBuilder(byte_level), byte_level.detokenizer(at_start=False)
    streamed = []
    for i, token_id in enumerate(ids):
        added = detokenizer.push([token_id])
        streamed += builder.build(scored([token_id]), added, last=i == len(ids) - 1).text_offset
    assert streamed == whole.text_offset


@pytest.mark.parametrize("prompt", [*TEXTS, "<|im_start|>user\n😀<|im_end|>\n"])
@pytest.mark.parametrize("text", TEXTS[:2])
def test_offsets_behind_an_echoed_prompt(byte_level: Tokenizer, prompt: str, text: str) -> None:
    ids, more = byte_level.encode(prompt), byte_level.encode(text)
    builder = CompletionLogprobsBuilder(byte_level)
    result = builder.with_prompt((ids, prompt), scored(ids[1:]), scored(more), text, last=True)
    assert len(result.text_offset) == len(result.tokens) == len(result.token_logprobs) == len(result.top_logprobs)
    check(byte_level, prompt, ids, result.text_offset[: len(ids)])
    check(byte_level, text, more, [offset - len(prompt) for offset in result.text_offset[len(ids) :]])


def test_tokens_that_leave_no_text_have_the_place_of_what_follows(
    byte_level: Tokenizer, byte_fallback: Tokenizer
) -> None:
    end = byte_level.special_id("<|im_end|>")
    assert end is not None
    ids = [*byte_level.encode("é"), end, *byte_level.encode("b"), end]
    hidden = CompletionLogprobsBuilder(byte_level).build(scored(ids), "éb", last=True)
    shown = CompletionLogprobsBuilder(byte_level, skip_special_tokens=False).build(
        scored(ids), "é<|im_end|>b<|im_end|>", last=True
    )
    count = len(byte_level.encode("é"))
    assert (hidden.text_offset[count:], shown.text_offset[count:]) == ([1, 1, 2], [1, 11, 12])
    bos = byte_fallback.special_id("<s>")
    assert bos is not None
    ids = [bos, *byte_fallback.encode("the thé")]
    for text, first in (("the thé", 0), ("<s> the thé", 3)):  # as it was given, and as the ids are decoded
        result = CompletionLogprobsBuilder(byte_fallback).with_prompt((ids, text), scored(ids[1:]), [], "", last=True)
        assert result.text_offset[:2] == [0, first]
        assert max(result.text_offset) < len(text)
        assert text[result.text_offset[-1] :] == "é"


def test_no_offset_is_beyond_a_text_that_was_stopped(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one two three four")
    result = CompletionLogprobsBuilder(byte_level).build(scored(ids), "one", last=True)
    assert result.text_offset == [0, 3, 3, 3]
