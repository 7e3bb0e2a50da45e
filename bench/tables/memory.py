"""The table of what starts took of GPUs with little memory, from bench/results/memory-*.json (bench/memory.py)."""

from __future__ import annotations

from bench.tables.markdown import table
from bench.tables.results import NAMES, Result, load

_GIB = 2**30
_PARTS = ("context", "weights", "copies", "kv_cache", "graphs_and_workspaces", "lowest_free")


def memory() -> str:
    """By a model and a GPU's size: its parts in GiB, and the speed of the longest request."""
    heads = ["model", "GPU, GiB", "context, tokens", "CUDA's context", "weights", "16-bit copies", "KV cache (tokens)"]
    heads += ["graphs and workspaces", "free at least", "tokens/s of that context"]
    result = load("memory-nvidia-h200.json")
    rows = {(row["model"], row["gib"]): row for row in [*result["before"], *result["rows"]] if "weights" in row}
    return table([*heads, "commit"], [_cells(row) for row in rows.values()])


def _cells(row: Result) -> list[str]:
    sizes = {name: f"{row[name] / _GIB:.2f}" for name in _PARTS}
    sizes["kv_cache"] += f" ({row['kv_tokens']})"
    place = NAMES[row["model"]], f"{row['gib']:g}", str(row["tokens"])
    return [*place, *sizes.values(), f"{row['long_tok_s']:.0f}", row["commit"]]
