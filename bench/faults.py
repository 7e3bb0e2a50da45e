"""Overload a real server of the embedded model, kill its engine and stop it under load: python -m bench.faults --help.

Each trial starts a server of its own, prints what it found and writes it to bench/results/faults.json. The exit code is 1
where the server did not keep a promise. Short forms of the trials run among the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.embedded_server import MODEL, Server, serving
from bench.load.client import Load, run_load
from bench.load.summary import summarize
from bench.machine import cores, cpu_name, versions

RESULT = Path(__file__).resolve().parent / "results" / "faults.json"
DEADLINE_S = 60.0
RECOVERY_S = 15.0


@dataclass
class Stream:
    """The answer to one request, as its client got it."""

    prompt: int
    tokens: list[str] = field(default_factory=list)
    ending: str = ""
    begun: float = 0.0
    """Seconds of time.monotonic(), like first_token and ended."""
    first_token: float | None = None
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """The time from the request to the end of its answer."""
        return self.ended - self.begun


def _body(prompt: int, max_tokens: int) -> dict[str, Any]:
    ids = [1000 + (prompt * 7919 + i * 104729) % 7000 for i in range(24 + prompt * 5)]
    return {"model": MODEL, "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "logprobs": 0}  # fmt: skip


async def _stream(client: httpx.AsyncClient, prompt: int, max_tokens: int) -> Stream:
    """Ask for one answer with log-probabilities, which name every token, and note how it ended."""
    stream = Stream(prompt, begun=time.monotonic())
    try:
        async with client.stream("POST", "/v1/completions", json=_body(prompt, max_tokens)) as answer:
            stream.ending = f"HTTP {answer.status_code}" if answer.status_code != 200 else "cut"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    stream.ending = "done"
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        stream.ending = f"error {event['error']['code']}"
                    for choice in event.get("choices", []):
                        stream.tokens += (choice.get("logprobs") or {}).get("tokens", [])
                        stream.first_token = stream.first_token or time.monotonic()
    except httpx.HTTPError as e:
        stream.ending = type(e).__name__
    stream.ended = time.monotonic()
    return stream


async def _clients(server: Server, count: int, max_tokens: int, until: asyncio.Event, prompts: int) -> list[Stream]:
    """The answers of `count` clients that send request after request; one that was refused waits for half a second."""
    streams: list[Stream] = []

    async def one(client: httpx.AsyncClient, rng: random.Random) -> None:
        while not until.is_set():
            streams.append(await _stream(client, rng.randrange(prompts), max_tokens))
            if streams[-1].ending.startswith("HTTP"):
                await asyncio.sleep(0.5)

    async with httpx.AsyncClient(base_url=server.url, timeout=2 * DEADLINE_S) as client:
        await asyncio.gather(*(one(client, random.Random(i)) for i in range(count)))
    return streams


def kills(times: int, clients: int = 8, max_tokens: int = 24, seed: int = 0) -> dict[str, Any]:
    """Kill the engine at random moments under load: how requests ended, duplicate tokens, seconds to recover.

    Half of the clients' requests run at a time; the others wait in the queue.
    """
    rng, prompts, recoveries = random.Random(seed), 8, []
    killed: list[float] = []

    async def trial(server: Server) -> list[Stream]:
        async with httpx.AsyncClient(base_url=server.url, timeout=2 * DEADLINE_S) as client:
            whole = [await _stream(client, i, max_tokens) for i in range(prompts)]
        over = asyncio.Event()
        load = asyncio.create_task(_clients(server, clients, max_tokens, over, prompts))
        for kill in range(1, times + 1):
            await asyncio.sleep(rng.uniform(0.0, 5.0))
            os.kill(server.engine(), signal.SIGKILL)
            begun = time.monotonic()
            killed.append(begun)
            while await asyncio.to_thread(
                server.metric, "nf4_engine_restarts_total"
            ) < kill or not await asyncio.to_thread(server.ready):
                if time.monotonic() > begun + DEADLINE_S:
                    raise RuntimeError(f"no engine {DEADLINE_S:.0f} s after kill {kill}")
                await asyncio.sleep(0.05)
            recoveries.append(time.monotonic() - begun)
            print(f"kill {kill}: again ready after {recoveries[-1]:.1f} s", file=sys.stderr, flush=True)
        over.set()
        streams = await load
        for stream in streams:
            expected = whole[stream.prompt].tokens
            # A token that was sent twice or left out shifts all tokens behind it.
            if stream.tokens != expected[: len(stream.tokens)]:
                stream.ending = "other tokens"
        return streams

    with serving(http__request_timeout_s=DEADLINE_S, engine__max_num_seqs=clients // 2) as server:
        streams = asyncio.run(trial(server))
    slowest = max(stream.seconds for stream in streams)
    endings = Counter(stream.ending for stream in streams)
    told = {"done", "error engine_error", "error timeout", "error engine_unavailable", "HTTP 503", "HTTP 500"}
    ended_as_told = set(endings) <= told and slowest < DEADLINE_S + 5
    waited = [s for s in streams if any(s.begun < kill < (s.first_token or s.ended) for kill in killed)]
    retried = [s for s in waited if s.ending == "done" and len(s.tokens) == max_tokens]
    return {
        "kills": times,
        "requests": len(streams),
        "endings": dict(endings),
        "without_a_token_when_the_engine_died": len(waited),
        "of_these_answered_whole_by_the_next": len(retried),
        "deadline_s": DEADLINE_S,
        "slowest_request_s": slowest,
        "recovery_s": {
            "median": statistics.median(recoveries),
            "max": max(recoveries),
            "all": [round(seconds, 2) for seconds in recoveries],
        },
        "ended_as_told": ended_as_told,
        "kept": ended_as_told and max(recoveries) < RECOVERY_S,
    }


def drain(clients: int = 16, max_tokens: int = 96) -> dict[str, Any]:
    """Send SIGTERM while clients stream: how their streams ended."""

    async def trial(server: Server) -> list[Stream]:
        async with httpx.AsyncClient(base_url=server.url, timeout=2 * DEADLINE_S) as client:
            tasks = [asyncio.create_task(_stream(client, i % 8, max_tokens)) for i in range(clients)]
            await asyncio.to_thread(server.wait_until_running, clients)
            # systemd signals all processes of a service; in a container only process 1 gets the signal.
            for pid in server.processes().values():
                os.kill(pid, signal.SIGTERM)
            return await asyncio.gather(*tasks)

    with serving() as server:
        streams = asyncio.run(trial(server))
        status = server.process.wait(60)
    whole = sum(stream.ending == "done" and len(stream.tokens) == max_tokens for stream in streams)
    return {"streams": clients, "whole": whole, "exit_status": status, "kept": whole == clients and status == 0}


def overload(seconds: float, factor: float = 10.0, slots: int = 8) -> dict[str, Any]:
    """`factor` times the sustainable rate: TTFT of those accepted beside that at capacity, refusals, memory.

    The server takes as many requests as it runs together; capacity is a closed loop of as many clients.
    """
    sizes: dict[str, Any] = {"prompt_tokens": (64, 192), "answer_tokens": (24, 48)}
    with serving(http__max_queue=slots, engine__max_num_seqs=slots) as server:
        asyncio.run(run_load(Load(server.url, MODEL, 4 * slots, concurrency=slots, seed=1, **sizes)))
        capacity = summarize(asyncio.run(run_load(Load(server.url, MODEL, 12 * slots, slots, seed=2, **sizes))))
        before, rate = server.memory(), factor * capacity["requests_per_s"]
        arrivals = Load(server.url, MODEL, int(rate * seconds), rate=rate, seed=3, **sizes)
        answers = asyncio.run(run_load(arrivals))
        under = summarize(answers)
        grown = server.memory() / before - 1
        healthy, left = server.ready(), server.metric("nf4_num_requests_running")
    refused = [a for a in answers if a.status == 429]
    ratio = under["ttft_s"]["p99"] / capacity["ttft_s"]["p99"]
    return {
        "capacity": {key: capacity[key] for key in ("requests_per_s", "ttft_s", "completion_tokens_per_s")},
        "offered_per_s": rate,
        "seconds": seconds,
        "accepted": under["completed"],
        "refused": len(refused),
        "other_endings": {k: v for k, v in under["errors"].items() if k != "HTTP 429"},
        "ttft_s": under["ttft_s"],
        "ttft_p99_ratio": ratio,
        "completion_tokens_per_s": under["completion_tokens_per_s"],
        "refusal_s": sorted(a.ended - a.sent for a in refused)[len(refused) // 2] if refused else None,
        "memory_growth": grown,
        "kept": ratio < 2
        and healthy
        and not left
        and len(refused) + under["completed"] == len(answers)
        and grown < 0.03,
    }


TRIALS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]]]] = {
    # The whole trial, and its short form.
    "kills": (lambda: kills(20), lambda: kills(2)),
    "drain": (drain, lambda: drain(8, 32)),
    "overload": (lambda: overload(120.0), lambda: overload(10.0)),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the trials; returns 1 when a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("trials", nargs="*", choices=[[], *TRIALS], help="default: all")
    parser.add_argument("--short", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    kept = True
    for name in options.trials or TRIALS:
        found = {**TRIALS[name][options.short](), "device": cpu_name(), "cores": cores(), "versions": versions()}
        print(json.dumps({name: found}, indent=2))
        report = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps({**report, name: found}, indent=2) + "\n")
        kept &= found["kept"]
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
