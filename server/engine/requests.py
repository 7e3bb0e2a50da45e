"""Checks of a request before it is queued."""

from __future__ import annotations

import math

from server.types import GenerateRequest


def check_request(request: GenerateRequest, vocabulary: int) -> None:
    """ValueError for what would otherwise fail inside a step, or sample from no distribution."""
    sampling = request.sampling
    ids = request.prompt_token_ids
    if not ids:
        raise ValueError("the prompt is empty")
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise ValueError(f"the prompt has token ids outside the vocabulary of {vocabulary}")
    if any(not 0 <= token < vocabulary for token in sampling.logit_bias):
        raise ValueError(f"logit_bias has token ids outside the vocabulary of {vocabulary}")
    numbers = (
        sampling.temperature,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
        *sampling.logit_bias.values(),
    )
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError("sampling parameters must be finite numbers")
    if sampling.temperature < 0 or sampling.repetition_penalty <= 0:
        raise ValueError("temperature must be at least 0 and repetition_penalty above 0")
    if not (0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1 and sampling.top_k >= 0):
        raise ValueError("top_p must be in (0, 1], min_p in [0, 1] and top_k at least 0")
    if sampling.max_tokens < 1:
        raise ValueError("max_tokens must be at least 1")
    if sampling.embed and (sampling.max_tokens > 1 or sampling.prompt_logprobs is not None or sampling.grammar):
        raise ValueError("a request that embeds has max_tokens 1, no prompt_logprobs and no grammar")
