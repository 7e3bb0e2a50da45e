"""Prompt tokens that replicas find in their KV caches, by how requests are sent to them: 20 beginnings that are shared.

A replica's KV cache holds a good half of them, so that all fit into two. Requests come one at a time: no replica is busier
than another then, so that power of two choices is a choice at random.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import httpx

from bench.embedded_server import MODEL
from bench.ray_serve.cluster import PATIENCE_S, application, ray_serve, samples

BEGINNINGS = 20
ROUNDS = 5
CACHE_BYTES = 110 << 20
"""A replica's KV cache: for about eleven of the beginnings."""
ROUTERS = ("prefix_affinity", "power_of_two")
REPLICAS = 2


def measure() -> dict[str, Any]:
    """Tokens in prompts and tokens found, for each router."""
    with ray_serve() as url:
        return measure_on(url)


def measure_on(url: str) -> dict[str, Any]:
    """The same on a Serve that runs, by its proxy's base URL."""
    rows = [_row(url, router) for router in ROUTERS]
    about = {"beginnings": BEGINNINGS, "rounds": ROUNDS, "replicas": REPLICAS, "kv_cache_bytes": CACHE_BYTES}
    return {**about, "rows": rows}


def _row(url: str, router: str) -> dict[str, Any]:
    engine = {"kv_cache_bytes": CACHE_BYTES, "standby": False}
    beginnings = [" ".join(f"Rule {i}.{n}: never mention {i * 31 + n}." for n in range(16)) for i in range(BEGINNINGS)]
    rng = random.Random(25)
    with application(config={"engine": engine}, replicas=REPLICAS, router=router):
        with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
            for number in range(ROUNDS):
                for beginning in rng.sample(beginnings, BEGINNINGS):
                    messages = [{"role": "user", "content": f"{beginning} {number}"}]
                    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
                    client.post("/v1/chat/completions", json=body).raise_for_status()
        found, all_tokens = (
            sum(samples(url, name).values()) for name in ("nf4_prompt_tokens_cached_total", "nf4_prompt_tokens_total")
        )
    row = {"router": router, "prompt_tokens": int(all_tokens), "cached_tokens": int(found)}
    print(row, file=sys.stderr, flush=True)
    return row


def failures(result: dict[str, Any]) -> list[str]:
    """Broken promises: twice the tokens of a random choice."""
    found = {row["router"]: row["cached_tokens"] for row in result["rows"]}
    ratio = found["prefix_affinity"] / found["power_of_two"]
    return [] if ratio >= 2 else [f"affinity finds {ratio:.2f} times the tokens of a random choice, not 2"]
