"""Encoding beside the event loop, and the bound that saves it."""

from __future__ import annotations

import asyncio
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.tokenizer import INLINE_CHARACTERS, Tokenizer


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@settings(deadline=None)
def test_bound_is_a_lower_bound(byte_level: Tokenizer, text: str) -> None:
    # Characters that this vocabulary has no tokens for vanish; they are not what the bound is about.
    if byte_level.decode(byte_level.encode(text)) == text:
        assert 0 < byte_level.fewest_tokens(text) <= len(byte_level.encode(text))


def test_bound_on_the_longest_token(byte_level: Tokenizer) -> None:
    assert byte_level.fewest_tokens(" " * 5000) <= len(byte_level.encode(" " * 5000))
    assert byte_level.fewest_tokens("a" * 10**6) > 8192


async def test_long_texts_do_not_hold_up_the_event_loop(byte_level: Tokenizer) -> None:
    text = "a b " * 100_000
    encoding, turns = threading.Event(), 0

    def encode() -> list[int]:
        encoding.set()
        found = byte_level.encode(text)
        encoding.clear()
        return found

    async def count() -> None:
        """The loop's turns while it encodes; a loop that waited for it would have none."""
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += encoding.is_set()

    counting = asyncio.create_task(count())
    ids = await byte_level.off_loop(len(text), encode)
    counting.cancel()
    assert len(ids) == 200_001
    assert turns > 3


async def test_short_texts_are_encoded_at_once(byte_level: Tokenizer) -> None:
    assert await byte_level.off_loop(10, threading.current_thread) is threading.main_thread()
    assert await byte_level.off_loop(INLINE_CHARACTERS, threading.current_thread) is not threading.main_thread()
