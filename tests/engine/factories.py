"""Short ways to make requests and sequences."""

from __future__ import annotations

import itertools
from typing import Any

from server.engine.scheduling.sequence import Sequence
from server.types import GenerateRequest, SamplingParams

_ids = itertools.count()


def make_request(prompt: list[int] | int, request_id: str | None = None, **sampling: Any) -> GenerateRequest:
    """A greedy request of 8 tokens unless sampling says otherwise; a number makes a prompt of that length."""
    tokens = list(range(3, 3 + prompt)) if isinstance(prompt, int) else prompt
    options = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return GenerateRequest(request_id or f"r{next(_ids)}", tokens, SamplingParams(**options))


def make_sequence(
    prompt: list[int] | int, eos: frozenset[int] = frozenset(), request_id: str | None = None, **sampling: Any
) -> Sequence:
    """The sequence of make_request(...)."""
    return Sequence(make_request(prompt, request_id, **sampling), sampling.get("seed") or 0, eos)
