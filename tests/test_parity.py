"""The server's greedy answers, all asked at once, against transformers.generate one at a time."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.conftest import RunningServer
from tests.prompts import CHATS, Chat
from tests.reference import Reference

# A different token is excused only where the reference itself could hardly choose.
NEAR_TIE = 0.05
MOST_NEAR_TIES = 2


@pytest.mark.parametrize(
    ("chats", "max_tokens"),
    [pytest.param(CHATS[:16:4], 16, id="4"), pytest.param(CHATS, 24, id="32", marks=pytest.mark.slow)],
)
async def test_greedy_chats_at_once_equal_transformers_one_at_a_time(
    server: RunningServer, reference: Reference, chats: list[Chat], max_tokens: int
) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)
    answers = await asyncio.gather(
        *(
            client.chat.completions.create(
                model="smollm2-135m-instruct",
                messages=chat,  # type: ignore[arg-type]
                max_tokens=max_tokens,
                temperature=0,
            )
            for chat in chats
        )
    )
    excused = 0
    for chat, answer in zip(chats, answers, strict=True):
        expected = reference.known_greedy(chat, max_tokens)
        text = answer.choices[0].message.content
        finished = expected.token_ids[-1] == reference.tokenizer.eos_token_id
        assert answer.choices[0].finish_reason == ("stop" if finished else "length")
        if text == reference.tokenizer.decode(expected.token_ids, skip_special_tokens=True):
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len(expected.token_ids)
            continue
        margin = _margin_where_they_part(reference, expected.token_ids, expected.margins, text or "")
        print(f"differs at a margin of {margin:.4f}: {chat[-1]['content'][:60]!r}: {text!r}")
        assert margin <= NEAR_TIE, chat
        excused += 1
    assert excused <= MOST_NEAR_TIES


def _margin_where_they_part(reference: Reference, token_ids: list[int], margins: list[float], text: str) -> float:
    """The smallest margin among the tokens up to the first at which the decoded reference leaves text."""
    for count in range(1, len(token_ids) + 1):
        if not text.startswith(
            reference.tokenizer.decode(token_ids[:count], skip_special_tokens=True).rstrip("\ufffd")
        ):
            return margins[count - 1]
    return margins[-1]
