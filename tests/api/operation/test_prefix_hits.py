"""A hybrid model computes little more of a conversation's turns than what is new in them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.random_model import write_random_model
from tests.conftest import serving

# tests/engine/test_hybrid_prefixes.py has the same without a server.
pytestmark = pytest.mark.rest
WORDS = ("the", "a", "river", "stone", "house", "light", "walks", "into", "green", "old", "seven", "of", "and", "sees")


@pytest.fixture(scope="module")
def hybrid(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("hybrid")
    config = write_random_model(folder, embedded_folder, hybrid=True)
    with serving(folder, config) as client:
        yield client


def ask(client: httpx.Client, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """The answer, the tokens of the prompt, and how many of them were computed."""
    body = {"model": "second-name", "messages": messages, "max_tokens": 12, "temperature": 0}
    answer: dict[str, Any] = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    usage = answer["usage"]
    count = usage["prompt_tokens"]
    return answer["choices"][0]["message"]["content"], count, count - usage["prompt_tokens_details"]["cached_tokens"]


def text_of(words: int, seed: int) -> str:
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) for _ in range(words))


def test_ten_turns_compute_at_most_a_tenth_more_than_what_is_new(hybrid: httpx.Client) -> None:
    messages: list[dict[str, str]] = []
    chance = random.Random(1)
    computed = known = 0
    for turn in range(10):
        # With the answer before it and the template's own tokens 50 to 700 tokens.
        messages.append({"role": "user", "content": text_of(chance.randint(30, 680), turn)})
        answer, known, own = ask(hybrid, messages)
        computed += own
        messages.append({"role": "assistant", "content": answer})
    assert known > 2000
    assert computed <= 1.1 * known, (computed, known)


def test_a_prompt_that_is_asked_again_computes_its_last_tokens_only(hybrid: httpx.Client) -> None:
    messages = [{"role": "user", "content": text_of(270, 77)}]
    first, count, computed = ask(hybrid, messages)
    assert 280 < count < 320
    assert computed >= count - 48  # the template begins as the other test's
    again, _, computed = ask(hybrid, messages)
    assert again == first
    # At least five tokens lie behind the last snapshot, which is at the end of a KV block.
    assert computed <= 16 + 5
