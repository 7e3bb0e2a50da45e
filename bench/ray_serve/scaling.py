"""From one replica to three and back while clients stream, by Serve's own autoscaling: no answer may be lost."""

from __future__ import annotations

import time
from typing import Any

from bench.ray_serve.clients import Clients, Watch
from bench.ray_serve.cluster import application, ray_serve, running, until

TARGET = 8
MANY, FEW = 30, 2
TOKENS = 48
# What a change of the number of replicas may take on a machine with fewer cores than replicas.
LIMIT_S = 300.0
# Before the number of clients falls, three replicas answer for so long.
HOLD_S = 10.0


def measure() -> dict[str, Any]:
    """Ends of all requests, and the number of replicas over time."""
    args = {
        "config": {"engine": {"kv_cache_bytes": 1 << 27, "standby": False}},
        "replicas": 1, "max_replicas": 3, "target_ongoing_requests": TARGET, "upscale_delay_s": 2, "downscale_delay_s": 5,
    }  # fmt: skip
    watch = Watch()
    with ray_serve() as url, application(**args):
        clients = Clients(url, TOKENS)
        try:
            clients.set_count(FEW)
            until(lambda: clients.ends.total() >= FEW)
            watch.note(running())
            clients.set_count(MANY)
            until(lambda: watch.note(running()) == 3, LIMIT_S)
            time.sleep(HOLD_S)
            clients.set_count(FEW)
            until(lambda: watch.note(running()) == 1, LIMIT_S)
            time.sleep(HOLD_S)
        finally:
            ends = clients.stop()
    return {
        "clients": [FEW, MANY, FEW],
        "target_ongoing_requests": TARGET,
        "tokens_per_answer": TOKENS,
        "ends": dict(ends),
        "replicas_running": watch.changes,
    }


def failures(result: dict[str, Any]) -> list[str]:
    """Broken promises: an answer that was not whole, or a number of replicas that was not seen."""
    lost = {end: count for end, count in result["ends"].items() if end != "whole"}
    counts = [count for _, count in result["replicas_running"]]
    found = [f"answers were lost: {lost}"] if lost else []
    if (counts[0], max(counts), counts[-1]) != (1, 3, 1):
        found.append(f"the numbers of replicas were {counts}")
    return found
