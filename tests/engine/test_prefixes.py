"""Prefix cache of models whose layers share keys and values, have windows, or have inputs of their own for each token."""

from __future__ import annotations

import pytest

from server.engine.core import Engine
from server.types import TokenLogprob
from tests.engine.factories import make_request, run_together, tokens
from tests.engine.hybrids import CONFIG, engine_of, prompt_of
from tests.marks import with_rest

Choices = list[tuple[list[int], list[TokenLogprob]]]


def choices(engine: Engine, prompt: list[int]) -> Choices:
    """Three choices of one request, by their seeds."""
    requests = [
        make_request(prompt, temperature=1.0, seed=5 + i, max_tokens=12, ignore_eos=True, logprobs=0) for i in range(3)
    ]
    found = run_together(engine, *requests)
    return [
        (tokens(outputs), [entry for output in outputs for entry in output.logprobs or ()])
        for outputs in (found[request.request_id] for request in requests)
    ]


@pytest.mark.parametrize(
    "family", with_rest(["gemma3n_text", "gemma4_text", "gemma3_text", "gpt_oss"], ["gemma3n_text"])
)
def test_choices_of_a_prompt_are_the_same_with_and_without_the_cache(family: str) -> None:
    """Sampled from so few tokens that no uniform number is within rounding of the next one's part."""
    engine = engine_of(family, CONFIG)
    plain = engine_of(family, CONFIG.model_copy(update={"enable_prefix_caching": False}))
    for length in (9, 17, 40, 101):
        prompt = prompt_of(length)
        expected = choices(plain, prompt)
        for _ in range(2):
            for (found, scores), (own, own_scores) in zip(choices(engine, prompt), expected, strict=True):
                assert found == own
                assert [s.logprob for s in scores] == pytest.approx([s.logprob for s in own_scores], abs=1e-3)
    assert engine.stats().prefix_cache_hits > 0
