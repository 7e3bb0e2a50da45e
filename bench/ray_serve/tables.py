"""Markdown tables of bench/results/ray-serve.json for docs/scaling.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "results" / "ray-serve.json"
ROUTERS = {"prefix_affinity": "`prefix_affinity`", "power_of_two": "`power_of_two`, one request at a time: at random"}


def affinity() -> str:
    """Prompt tokens that were found in KV caches, by router."""
    rows = [
        [
            ROUTERS[row["router"]],
            f"{row['prompt_tokens']:,}",
            f"{row['cached_tokens']:,}",
            f"{row['cached_tokens'] / row['prompt_tokens']:.0%}",
        ]
        for row in _part("affinity")["rows"]
    ]
    return _table(["router", "prompt tokens", "found in a KV cache", "share"], rows)


def throughput() -> str:
    """Medians over the rounds of both ways to two replicas."""
    rounds = _part("throughput")["rounds"]
    rows = []
    for side, name in (("balancer", "HAProxy, TCP"), ("ray", "Ray Serve")):
        found = [each[side] for each in rounds]
        kinds = sorted({kind for each in found for kind in each["cpu_ms_per_token"]})
        cost = {kind: statistics.median(each["cpu_ms_per_token"].get(kind, 0.0) for each in found) for kind in kinds}
        engines = sum(ms for kind, ms in cost.items() if kind.startswith("engine"))
        rows.append(
            [
                name,
                f"{statistics.median(each['tokens_per_s'] for each in found):.0f}",
                f"{1000 * statistics.median(each['ttft_alone_s'] for each in found):.0f}",
                f"{engines:.2f}",
                f"{sum(cost.values()) - engines:.2f}",
            ]
        )
    heads = ["in front", "tokens/s", "first token of a request alone, ms"]
    return _table([*heads, "engines, ms of processor time a token", "everything else, ms a token"], rows)


def recovery() -> str:
    """Each loss, and how long replicas were missing."""
    rows = [
        [
            row["lost"],
            f"{row['noticed_s']:.1f}",
            f"{row['back_s']:.1f}",
            f"{row['cores_had']:.2f}",
            f"{row['load_average_before']:.0f}",
        ]
        for row in _part("recovery")["losses"]
    ]
    return _table(["lost", "noticed after, s", "back after, s", "cores that Ray got meanwhile", "load average"], rows)


def _part(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text())[name]
    return found


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))
