"""Lengths of prompts and answers in tokens: fixed, even over a range, or log-normal, as people's texts are."""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass

LONGEST_TIMES = 20
"""A log-normal sample is at most this many times the median, so that one long request is not the whole load."""


@dataclass(frozen=True)
class LogNormal:
    """Lengths whose logarithm is normal, with this median and this standard deviation of the logarithm."""

    median: float
    sigma: float


Lengths = tuple[int, int] | LogNormal
"""(low, high), both included; or a LogNormal."""


def sample_length(lengths: Lengths, rng: random.Random) -> int:
    """One length, at least 1."""
    if isinstance(lengths, LogNormal):
        sampled = rng.lognormvariate(math.log(lengths.median), lengths.sigma)
        return max(1, round(min(sampled, LONGEST_TIMES * lengths.median)))
    return rng.randint(*lengths)


def parse_lengths(text: str) -> Lengths:
    """N, LOW-HIGH or lognormal:MEDIAN:SIGMA. Raises argparse.ArgumentTypeError, which names the text."""
    try:
        if text.startswith("lognormal:"):
            median, sigma = (float(part) for part in text.removeprefix("lognormal:").split(":"))
            if median >= 1 and sigma >= 0:
                return LogNormal(median, sigma)
        else:
            low, _, high = text.partition("-")
            if 1 <= int(low) <= int(high or low):
                return int(low), int(high or low)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not N, LOW-HIGH or lognormal:MEDIAN:SIGMA, of tokens from 1 up")
