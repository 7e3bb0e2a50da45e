"""The table of speculation in docs/performance.md, of all bench/results/speculation-*.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
HEADS = ("device", "model", "guesses by", "text", "sequences", "guesses", "right", "tokens/s", "without", "times")


def speculation(folder: Path = RESULTS) -> str:
    """A row for each model, method, text and batch; the times are medians of rounds, not the quotient of the columns."""
    lines = [HEADS, ("---",) * len(HEADS)]
    for path in sorted(folder.glob("speculation-*.json")):
        found = json.loads(path.read_text())
        lines += [_cells(_device(found["machine"], row), row) for row in found["rows"]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _device(machine: dict[str, Any], row: dict[str, Any]) -> str:
    if row.get("threads") is None:
        return str(machine["device"])
    clock = ", processor time" if row.get("processor_time") else ""
    return f"{machine['device']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}{clock}"


def _cells(device: str, row: dict[str, Any]) -> tuple[str, ...]:
    guesses = (f"{row['guesses']:.1f}", f"{row['accept_rate']:.2f}") if row["guesses"] else ("0", "")
    speeds = f"{row['tok_s']:.1f}", f"{row['off_tok_s']:.1f}", f"{row['ratio']:.2f}"
    return (device, row["model"], row["method"], row["task"], str(row["batch"]), *guesses, *speeds)
