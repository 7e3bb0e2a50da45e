"""A server under a mixed load for minutes: nothing may leak. python -m bench.soak [--minutes 20]

Clients send short and long prompts, grammars, several sequences, and leave early at random. Afterwards no cache block
is held, and both processes have as many files open and as much memory as after the first part, within 3 %. Written to
bench/results/soak.json; exit code 1 where something has leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from bench.faults import MODEL, Server, serving

RESULT = Path(__file__).resolve().parent / "results" / "soak.json"
CLIENTS = 8
# Part of the time in which caches and allocators fill.
WARM = 0.25
MOST_GROWTH = 0.03
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}


def _body(draw: random.Random) -> dict[str, Any]:
    length = draw.choice((4, 30, 120, 600, 1500))
    text = " ".join(draw.choice(("night", "river", "code", "seven", "lamp")) for _ in range(length))
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": draw.choice((1, 8, 40, 120)),
        "temperature": draw.choice((0, 0.8)),
        "stream": draw.random() < 0.7,
    }
    kind = draw.random()
    if kind < 0.2:
        schema = {"name": f"s{draw.randrange(20)}", "schema": SCHEMA}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif kind < 0.3:
        body["n"] = 3
    elif kind < 0.4:
        body["logprobs"], body["top_logprobs"] = True, 5
    return body


async def _client(server: Server, number: int, until: float, endings: Counter[str]) -> None:
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        while time.monotonic() < until:
            body, leave = _body(draw), draw.random() < 0.25
            try:
                async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    lines = 0
                    async for _ in answer.aiter_lines():
                        lines += 1
                        if leave and lines > 3:
                            break
                endings["left" if leave else f"HTTP {answer.status_code}"] += 1
            except httpx.HTTPError as e:
                endings[type(e).__name__] += 1


def _state(server: Server) -> dict[str, float]:
    files = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (server.process.pid, server.engine()))
    return {"memory_bytes": server.memory(), "open_files": files}


def _idle(server: Server) -> dict[str, float]:
    """What the server holds once nothing runs."""
    end = time.monotonic() + 30
    while server.metric("nf4_num_requests_running") + server.metric("nf4_kv_cache_usage_perc"):
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    blocks = server.metric("nf4_kv_cache_usage_perc")
    # Idle connections of the clients that have just gone are closed by now.
    time.sleep(1)
    return {**_state(server), "cache_in_use": blocks, "running": server.metric("nf4_num_requests_running")}


def soak(minutes: float) -> dict[str, Any]:
    """Load for so many minutes: states after the first part and at the end, and what has grown."""
    endings: Counter[str] = Counter()

    async def load(server: Server, seconds: float, first: int) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(_client(server, first + i, until, endings) for i in range(CLIENTS)))

    with serving() as server:
        asyncio.run(load(server, WARM * 60 * minutes, 0))
        warm = _idle(server)
        print(f"after the first part: {warm}", file=sys.stderr, flush=True)
        asyncio.run(load(server, (1 - WARM) * 60 * minutes, CLIENTS))
        end = _idle(server)
        restarts = server.metric("nf4_engine_restarts_total")
    growth = {key: end[key] / warm[key] - 1 for key in ("memory_bytes", "open_files")}
    clean = not end["cache_in_use"] and not end["running"] and not restarts
    return {
        "minutes": minutes,
        "endings": dict(endings),
        "engine_restarts": restarts,
        "warm": warm,
        "end": end,
        "growth": growth,
        "kept": clean and max(growth.values()) <= MOST_GROWTH and set(endings) <= {"HTTP 200", "left"},
    }


def main(arguments: list[str] | None = None) -> int:
    """Run it; returns 1 where something has leaked."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    found = soak(options.minutes)
    print(json.dumps(found, indent=2))
    options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if found["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
