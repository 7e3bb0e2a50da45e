"""The table of times that are expected on GPUs which have not been measured: python -m bench.tables.cards prints it.

A time on an H200 that ran code for those GPUs (bench/results/posed-86-nvidia-h200.json) is taken as many times as there are
fewer multiprocessors and clocks. It is never less than the time of the bytes at _BYTES_SHARE of the card's bandwidth, nor
than that of the arithmetic at the rate of its data sheet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bench.tables.markdown import table
from bench.tables.results import load

_BYTES_SHARE = 0.86
"""Of a card's bandwidth, what the fastest launches of an H100 read of its 3350 GB/s (16-bit weights)."""
_NF4_BYTES, _HALF_BYTES = 0.516, 2.0
"""Bytes of a weight, scales included."""
_WEIGHT = (28672, 4096)
_TOKENS = (1, 8, 16, 32, 48, 64)
_H200_CLOCKS = 132 * 1.98


class Card(NamedTuple):
    """A GPU by its data sheet: bandwidth in GB/s, multiprocessors, boost clock in GHz."""

    name: str
    bandwidth: float
    multiprocessors: int
    clock: float
    flops: int
    """Of a multiprocessor and clock: dense bfloat16 with sums in float32."""

    def microseconds(self, posed: float, tokens: int, weights: int, weight_bytes: float) -> float:
        """The time that is expected where an H200 took `posed` microseconds for as many tokens and weights."""
        clocks = self.multiprocessors * self.clock
        read = weights * weight_bytes / (_BYTES_SHARE * self.bandwidth * 1e3)
        return max(posed * _H200_CLOCKS / clocks, read, 2 * tokens * weights / (clocks * self.flops * 1e3))


CARDS = (
    Card("RTX 3060 12 GB", 360, 28, 1.78, 512),
    Card("RTX 3090", 936, 82, 1.70, 512),
    Card("RTX 4090", 1008, 128, 2.52, 512),
    Card("RTX 5060 Ti 16 GB", 448, 36, 2.57, 512),
    Card("RTX 5090", 1792, 170, 2.41, 512),
    Card("L40S", 864, 142, 2.52, 1024),
    Card("RTX PRO 6000", 1792, 188, 2.62, 1024),
    Card("A100 40 GB", 1555, 108, 1.41, 2048),
    Card("A100 80 GB", 2039, 108, 1.41, 2048),
)


def cards() -> str:
    """By card and tokens, the time of our launch, and bitsandbytes' and bf16 cuBLAS's over it."""
    n, k = _WEIGHT
    rows = [row for row in load("posed-86-nvidia-h200.json")["rows"] if (row["n"], row["k"]) == _WEIGHT]
    by_tokens = {row["m"]: row for row in rows}
    lines = [[card.name, *(_cell(card, by_tokens[tokens], n * k) for tokens in _TOKENS)] for card in CARDS]
    return table(["GPU", *(f"M = {tokens}" for tokens in _TOKENS)], lines)


def _cell(card: Card, row: dict[str, Any], weights: int) -> str:
    time = card.microseconds(row["ours"], row["m"], weights, _NF4_BYTES)
    bitsandbytes = card.microseconds(row["bitsandbytes"], row["m"], weights, _NF4_BYTES) / time
    half = card.microseconds(row["bf16"], row["m"], weights, _HALF_BYTES) / time
    return f"**{time:.0f}** ({bitsandbytes:.1f}, {half:.1f})"


if __name__ == "__main__":
    print(cards())
