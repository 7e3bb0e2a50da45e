"""Rates and quantiles of a load's answers."""

from __future__ import annotations

import statistics
from typing import Any

from bench.load.client import Answer

QUANTILES = (0.5, 0.9, 0.99)


def summarize(answers: list[Answer], ttft_slo_s: float | None = None, itl_slo_s: float | None = None) -> dict[str, Any]:
    """Rates, and quantiles of time to first token, time between tokens and whole time, in seconds.

    goodput counts the answers per second whose TTFT and mean time per later token kept the given limits.
    """
    done = [a for a in answers if a.ok]
    wall = max((a.ended for a in answers), default=0.0) - min((a.sent for a in answers), default=0.0)
    tokens = sum(a.completion_tokens for a in done)
    per_token = [(a.chunks[-1] - a.chunks[0]) / (a.completion_tokens - 1) for a in done if a.completion_tokens > 1]
    good = [
        a
        for a in done
        if a.chunks
        and (ttft_slo_s is None or a.chunks[0] - a.sent <= ttft_slo_s)
        and (itl_slo_s is None or (a.chunks[-1] - a.chunks[0]) / max(1, a.completion_tokens - 1) <= itl_slo_s)
    ]
    errors: dict[str, int] = {}
    for a in answers:
        if not a.ok:
            reason = f"HTTP {a.status}" if a.status not in (0, 200) else a.error or "stream ended without finish_reason"
            errors[reason] = errors.get(reason, 0) + 1
    return {
        "requests": len(answers),
        "completed": len(done),
        "errors": errors,
        "seconds": wall,
        "requests_per_s": len(done) / wall if wall else 0.0,
        "completion_tokens_per_s": tokens / wall if wall else 0.0,
        "prompt_tokens_per_s": sum(a.prompt_tokens for a in done) / wall if wall else 0.0,
        "goodput_per_s": len(good) / wall if wall else 0.0,
        "ttft_s": quantiles([a.chunks[0] - a.sent for a in done if a.chunks]),
        "itl_s": quantiles([b - a for answer in done for a, b in zip(answer.chunks, answer.chunks[1:], strict=False)]),
        "time_per_output_token_s": quantiles(per_token),
        "e2e_s": quantiles([a.ended - a.sent for a in done]),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p90, p99 (nearest rank), mean and max of values; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    named = {f"p{q * 100:g}": ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES}
    return {**named, "mean": statistics.fmean(ordered), "max": ordered[-1]}
