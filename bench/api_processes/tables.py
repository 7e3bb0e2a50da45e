"""The Markdown table of bench/results/api-processes.json for docs/scaling.md."""

from __future__ import annotations

import json
from pathlib import Path

RESULT = Path(__file__).parents[1] / "results" / "api-processes.json"
_HEADS = (
    "API processes",
    "tokens/s",
    "cores they got",
    "tokens per API processor second",
    "tokens in an event",
    "first token, ms (median)",
    "largest share of one process",
)


def api_processes() -> str:
    """The tokens that each number of processes carried, with the fastest stub."""
    rows = json.loads(RESULT.read_text())["rows"]
    fastest = max(row["stub_tokens_per_s"] for row in rows)
    lines = [
        [
            str(row["api_processes"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['api_cores']:.2f}",
            f"{round(row['tokens_per_api_cpu_second'], -2):,.0f}",
            f"{row['tokens_per_event']:.1f}",
            f"{1000 * row['ttft_s_p50']:.0f}",
            f"{row['largest_share']:.2f}",
        ]
        for row in rows
        if row["stub_tokens_per_s"] == fastest
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (_HEADS, ["---"] * len(_HEADS), *lines))
