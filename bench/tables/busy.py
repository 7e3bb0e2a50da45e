"""The table of hundreds of sequences and long contexts in docs/lab/performance.md, from bench/results/busy-<device>.json."""

from __future__ import annotations

from collections import Counter

from bench.tables.markdown import table
from bench.tables.results import Result, load

FILE = "busy-nvidia-h200.json"


def busy() -> str:
    """Llama-3.1-8B's shape at large batches and long contexts, the newest state of the code last."""
    result = load(FILE)
    states: dict[str, dict[tuple[str, int, int], Result]] = {}
    for row in [*result["rows"], *result["before"]]:
        if "batch" in row and row.get("kv", "auto") == "auto":
            states.setdefault(row["commit"], {})[row["mode"], row["batch"], row["length"]] = row
    counts = Counter(place for found in states.values() for place in found)
    columns = sorted((place for place, count in counts.items() if count > 1), key=lambda p: (p[0], p[2], p[1]))
    heads = ["commit", *(f"{'prefill ' * (mode == 'prefill')}{batch} x {length}" for mode, batch, length in columns)]
    lines = []
    for commit, found in reversed(states.items()):
        own = [found.get(column, {}) for column in columns]
        lines.append([commit, *(f"{row['ours_tok_s']:.0f}" if row else "" for row in own)])
        lines.append(["its median step, ms", *(f"{row['step_ms']:.1f}" if "step_ms" in row else "" for row in own)])
    return table(heads, lines)
