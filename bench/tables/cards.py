"""The table of times that are expected on GPUs which have not been measured: python -m bench.tables.cards prints it.

A time on an H100 that ran code for those GPUs (bench/results/posed-86-nvidia-h100.json) is taken as many times as there are
fewer multiprocessors and clocks, and never less than the time of the bytes at _BYTES_SHARE of the card's bandwidth.
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
_TOKENS = (1, 8, 16, 32, 48)
_H100_CLOCKS = 132 * 1.98


class Card(NamedTuple):
    """A GPU by its data sheet: bandwidth in GB/s, multiprocessors, boost clock in GHz."""

    name: str
    bandwidth: float
    multiprocessors: int
    clock: float

    def microseconds(self, posed: float, weights: int, weight_bytes: float) -> float:
        """The time that is expected where an H100 took `posed` microseconds for as many weights."""
        issued = posed * _H100_CLOCKS / (self.multiprocessors * self.clock)
        return max(issued, weights * weight_bytes / (_BYTES_SHARE * self.bandwidth * 1e3))


CARDS = (
    Card("RTX 3090", 936, 82, 1.70),
    Card("RTX 4090", 1008, 128, 2.52),
    Card("A100 80 GB", 2039, 108, 1.41),
    Card("L40S", 864, 142, 2.52),
    Card("RTX 5090", 1792, 170, 2.41),
    Card("RTX PRO 6000", 1792, 188, 2.62),
)


def cards() -> str:
    """By card and tokens, the time of our launch, and bitsandbytes' and bf16 cuBLAS's over it."""
    n, k = _WEIGHT
    rows = [row for row in load("posed-86-nvidia-h100.json")["landed"] if (row["n"], row["k"]) == _WEIGHT]
    by_tokens = {row["m"]: row for row in rows}
    lines = [[card.name, *(_cell(card, by_tokens[tokens], n * k) for tokens in _TOKENS)] for card in CARDS]
    return table(["GPU", *(f"M = {tokens}" for tokens in _TOKENS)], lines)


def _cell(card: Card, row: dict[str, Any], weights: int) -> str:
    # 16 warps are not compiled any more.
    ours = min(us for _, warps, _, us in row["linear_mma"] if warps == 8)
    time = card.microseconds(ours, weights, _NF4_BYTES)
    bitsandbytes = card.microseconds(row["bitsandbytes"], weights, _NF4_BYTES) / time
    half = card.microseconds(row["bf16"], weights, _HALF_BYTES) / time
    return f"**{time:.0f}** ({bitsandbytes:.1f}, {half:.1f})"


if __name__ == "__main__":
    print(cards())
