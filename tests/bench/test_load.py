"""The load tool's arithmetic, and that it tells refused and broken streams from whole answers."""

from __future__ import annotations

import argparse
import random
import statistics

import pytest

from bench.load.client import Answer
from bench.load.lengths import parse_lengths, sample_length
from bench.load.summary import quantiles, summarize


def answered(sent: float, *chunks: float, tokens: int | None = None) -> Answer:
    return Answer(sent, 200, "", "length", 10, tokens or len(chunks), list(chunks), chunks[-1])


def test_quantiles_by_nearest_rank() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert quantiles(values) == {"p50": 51.0, "p90": 91.0, "p99": 100.0, "mean": 50.5, "max": 100.0}
    assert quantiles([3.0])["p99"] == 3.0
    assert quantiles([]) == {}


def test_summary_counts_only_whole_answers() -> None:
    refused = Answer(0.0, 429, "busy", ended=0.1)
    broken = Answer(0.0, 200, "", "", 10, 0, [0.5], 0.6)
    summary = summarize([answered(0.0, 1.0, 1.5, 2.0), answered(1.0, 4.0, 5.0), refused, broken])
    assert summary["completed"] == 2
    assert summary["errors"] == {"HTTP 429": 1, "stream ended without finish_reason": 1}
    assert summary["seconds"] == 5.0
    assert summary["completion_tokens_per_s"] == 1.0
    assert summary["ttft_s"]["max"] == 3.0
    assert summary["itl_s"]["p50"] == 0.5
    assert summary["e2e_s"]["max"] == 4.0


def test_goodput_counts_answers_within_both_limits() -> None:
    answers = [answered(0.0, 1.0, 1.5, 2.0), answered(0.0, 1.0, 3.0), answered(0.0, 4.0, 4.1)]
    assert summarize(answers)["goodput_per_s"] * 4.1 == 3.0
    assert round(summarize(answers, ttft_slo_s=2.0)["goodput_per_s"] * 4.1, 6) == 2.0
    assert round(summarize(answers, ttft_slo_s=2.0, itl_slo_s=0.6)["goodput_per_s"] * 4.1, 6) == 1.0


def test_lengths() -> None:
    rng = random.Random(0)
    assert parse_lengths("64") == (64, 64)
    assert parse_lengths("3-9") == (3, 9)
    assert {sample_length((3, 5), rng) for _ in range(100)} == {3, 4, 5}
    lengths = parse_lengths("lognormal:200:0.8")
    lengths_sampled = [sample_length(lengths, rng) for _ in range(4000)]
    assert 185 < statistics.median(lengths_sampled) < 215
    assert statistics.fmean(lengths_sampled) > 1.2 * statistics.median(lengths_sampled)
    assert max(lengths_sampled) <= 4000


@pytest.mark.parametrize("text", ["", "0", "9-3", "a", "-5", "lognormal:1", "lognormal:0:1", "lognormal:5:x", "1-2-3"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not N"):
        parse_lengths(text)
