"""The table of models that fit a GPU's memory, from bench/results/fits.json (bench/fits.py)."""

from __future__ import annotations

from bench.tables.markdown import table
from bench.tables.results import NAMES, load

GIB = 2**30


def fits() -> str:
    """By a model and a GPU's memory, the tokens that the KV cache holds with the default configuration."""
    rows = sorted(load("fits.json")["rows"], key=lambda row: int(row["weights"]))
    heads = ["model", "weights, GiB", *(f"{size} GB" for size in rows[0]["tokens"]), "on a CPU, GiB"]
    lines = [
        [
            NAMES[row["model"]],
            f"{row['weights'] / GIB:.1f}",
            *(f"{count // 1000}k" if count else "" for count in row["tokens"].values()),
            f"{row['weights_cpu'] / GIB + 2:.0f}",
        ]
        for row in rows
    ]
    return table(heads, lines)
