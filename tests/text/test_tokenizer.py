"""Encoding beside the event loop, and the bound that saves it."""

from __future__ import annotations

import asyncio
import time

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
    worst = 0.0

    async def beat() -> None:
        nonlocal worst
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - before)

    beating = asyncio.create_task(beat())
    started = time.perf_counter()
    ids = await byte_level.off_loop(len(text), lambda: byte_level.encode(text))
    elapsed = time.perf_counter() - started
    beating.cancel()
    assert len(ids) == 200_001
    assert worst < max(0.1, 0.5 * elapsed)


async def test_short_texts_are_encoded_at_once(byte_level: Tokenizer) -> None:
    import threading

    assert await byte_level.off_loop(10, threading.current_thread) is threading.main_thread()
    assert await byte_level.off_loop(INLINE_CHARACTERS, threading.current_thread) is not threading.main_thread()
