"""Tokens per second of the engine itself, called directly in this process."""

from __future__ import annotations

import random
import statistics
import time

from server.engine.core import Engine
from server.types import GenerateRequest, SamplingParams

PROMPT = ANSWER = 128
"""Tokens in and out of a request in decode."""
FIRST = 16
"""Decode is timed from the step in which every request has this many tokens."""


def requests(count: int, prompt: int, answer: int, vocabulary: int, seed: int) -> list[GenerateRequest]:
    """Greedy requests with random prompts of `prompt` tokens, each of which gets exactly `answer` tokens."""
    rng = random.Random(seed)
    sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    return [
        GenerateRequest(f"{seed}-{i}", [rng.randrange(1000, vocabulary - 1000) for _ in range(prompt)], sampling)
        for i in range(count)
    ]


def decode(
    engine: Engine, batch: int, vocabulary: int, seed: int, prompt: int = PROMPT, answer: int = ANSWER
) -> dict[str, float]:
    """Tokens per second of `batch` requests together, and the median time of a step in milliseconds."""
    for request in requests(batch, prompt, answer, vocabulary, seed):
        engine.add(request)
    generated, started, begun_with, steps = 0, 0.0, 0, []
    least: dict[str, int] = {}
    while engine.has_work:
        before = time.perf_counter()
        for output in engine.step().outputs:
            generated += len(output.new_token_ids)
            least[output.request_id] = least.get(output.request_id, 0) + len(output.new_token_ids)
        now = time.perf_counter()
        if started:
            steps.append(now - before)
        elif len(least) == batch and min(least.values()) >= FIRST:
            started, begun_with = now, generated
    elapsed = time.perf_counter() - started
    return {"tok_s": (generated - begun_with) / elapsed, "step_ms": statistics.median(steps) * 1e3}


def prefill(engine: Engine, batch: int, length: int, vocabulary: int, seed: int) -> float:
    """Prompt tokens per second of `batch` prompts of `length` tokens each."""
    for request in requests(batch, length, 1, vocabulary, seed):
        engine.add(request)
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return batch * length / (time.perf_counter() - started)


def closed_loop(engine: Engine, clients: int, count: int, vocabulary: int, seed: int) -> float:
    """Generated tokens per second of count requests, `clients` of them at a time, as clients of a server would send them."""
    waiting = requests(count, PROMPT, ANSWER, vocabulary, seed)
    started = time.perf_counter()
    for _ in range(clients):
        engine.add(waiting.pop())
    while engine.has_work:
        for output in engine.step().outputs:
            if output.finish_reason is not None and waiting:
                engine.add(waiting.pop())
    return count * ANSWER / (time.perf_counter() - started)
