"""Short ways to make requests and sequences, and to run requests."""

from __future__ import annotations

import itertools
from typing import Any

from server.engine.core import Engine
from server.engine.scheduling.sequence import Sequence
from server.types import GenerateRequest, RequestOutput, SamplingParams

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


def run_together(engine: Engine, *requests: GenerateRequest) -> dict[str, list[RequestOutput]]:
    """All outputs of the requests, sent at once."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    """The tokens of one request's outputs."""
    return [token for output in outputs for token in output.new_token_ids]
