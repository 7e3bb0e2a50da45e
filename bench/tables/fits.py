"""The table of models that fit a GPU's memory, from bench/results/fits.json (bench/fits.py)."""

from __future__ import annotations

from bench.tables.markdown import table
from bench.tables.results import NAMES, Result, load

GIB = 2**30
SIZES = (8, 12, 16, 24, 32, 48, 80)
OTHER_BYTES = int(0.8 * GIB)
"""About what CUDA, torch and the kernels hold on a GPU."""
RESERVED_SHARE, COPIES_SHARE = 0.03, 0.25
"""As in server/engine/runtime: memory that no tensor can use, and the share of engine.expanded_weights: auto."""
LEAST_TOKENS = 2048


def fits() -> str:
    """By a model and a GPU's memory, the tokens that the KV cache holds with the default configuration."""
    rows = sorted(load("fits.json")["rows"], key=lambda row: int(row["weights"]))
    heads = ["model", "weights, GiB", *(f"{size} GB" for size in SIZES), "on a CPU, GiB"]
    lines = [
        [
            NAMES[row["model"]],
            f"{row['weights'] / GIB:.1f}",
            *(_tokens(cached_tokens(row, size * GIB)) for size in SIZES),
            f"{row['weights_cpu'] / GIB + 2:.0f}",
        ]
        for row in rows
    ]
    return table(heads, lines)


def cached_tokens(row: Result, memory: int, cache: str = "auto") -> int:
    """Tokens that the KV cache holds if weights, 16-bit copies of them and a largest step have their memory; 0: too few."""
    free = memory - OTHER_BYTES - row["weights"] - int(memory * RESERVED_SHARE)
    left = free * (1 - COPIES_SHARE) - row["step"]
    tokens = int(max(0, left) // row["token"][cache])
    return tokens if tokens >= LEAST_TOKENS else 0


def _tokens(count: int) -> str:
    return "" if not count else f"{count // 1000}k"
