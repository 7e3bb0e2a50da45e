"""Markdown tables of bench/results/ray-serve.json for docs/scaling.md."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from bench.tables.markdown import table

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
    return table(["router", "prompt tokens", "found in a KV cache", "share"], rows)


def recovery() -> str:
    """Seconds from each loss until it was noticed, and until all replicas ran again."""
    rows = [
        [loss["lost"], f"{loss['noticed_s']:.1f}", f"{loss['back_s']:.1f}", f"{loss['cores_had']:.1f}"]
        for loss in _part("recovery")["losses"]
    ]
    return table(["lost", "noticed after, s", "replicas are back after, s", "cores that Ray's processes had"], rows)


def throughput() -> str:
    """Medians over the rounds of the ways to two replicas; each way through Ray Serve was measured beside the balancer."""
    rows = _ways(_part("throughput"), "Ray Serve")
    rows += _ways(_part("throughput_haproxy"), "Ray Serve with HAProxy for its proxy")
    heads = ["in front", "tokens/s", "median of the rounds' ratios", "first token of a request alone, ms"]
    return table([*heads, "engines, processor ms a token", "all else, processor ms a token"], rows)


def _ways(measured: dict[str, Any], through_ray: str) -> list[list[str]]:
    rows = []
    for side, name in (("balancer", "HAProxy, TCP"), ("ray", through_ray)):
        found = [each[side] for each in measured["rounds"]]
        engines = [_engines(each["cpu_ms_per_token"]) for each in found]
        others = [sum(each["cpu_ms_per_token"].values()) - ms for each, ms in zip(found, engines, strict=True)]
        rows.append(
            [
                name,
                f"{statistics.median(each['tokens_per_s'] for each in found):.0f}",
                f"{measured['throughput_ratio']:.2f}" if side == "ray" else "",
                f"{1000 * statistics.median(each['ttft_alone_s'] for each in found):.0f}",
                f"{statistics.median(engines):.1f}",
                f"{statistics.median(others):.1f}",
            ]
        )
    return rows


def _engines(milliseconds: dict[str, float]) -> float:
    return sum(ms for kind, ms in milliseconds.items() if kind.startswith("engine"))


def _part(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text())[name]
    return found
