"""Load a running server over HTTP and measure what its clients see: python -m bench.load --help.

Closed loop (--concurrency): that many clients, each sending its next request when the last one ended. Open loop
(--rate): requests arrive at random (Poisson), or evenly (--arrivals), whether or not earlier ones are answered.
Prompts are lists of random token ids of the length asked for, so that nothing is cached and lengths are exact; --chat
sends text instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from bench.load_lengths import Lengths, draw_length, parse_lengths

QUANTILES = (0.5, 0.9, 0.99)
_OPEN_LOOP_CLIENTS = 32
_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=1000)


@dataclass(frozen=True)
class Load:
    """What to send. Lengths are tokens; rate is requests per second."""

    base_url: str
    model: str
    requests: int
    concurrency: int | None = None
    rate: float | None = None
    prompt_tokens: Lengths = (128, 128)
    answer_tokens: Lengths = (64, 64)
    chat: bool = False
    seed: int = 0
    timeout_s: float = 600.0
    poisson: bool = True
    """Whether the open loop's requests arrive at random; else one every 1 / rate seconds."""
    deal: tuple[int, int] = (0, 1)
    """(first, step): send requests first, first + step, ... at the times they have among all; concurrency is for these."""


@dataclass
class Answer:
    """One request as its client saw it. Times are seconds on the monotonic clock."""

    sent: float
    status: int = 0
    error: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    chunks: list[float] = field(default_factory=list)
    """When each piece of text arrived."""
    ended: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether a whole answer came."""
        return self.status == 200 and not self.error and bool(self.finish_reason)


async def run_load(load: Load, on_done: Callable[[], object] = lambda: None) -> list[Answer]:
    """Send the load and wait for every answer; the result is in the order of sending."""
    draw = random.Random(load.seed)
    first, step = load.deal
    bodies = [_body(load, draw) for _ in range(load.requests)]
    # httpx goes through all connections of a client for every request: a client for a few of them each.
    count = load.concurrency or 1 if load.rate is None else _OPEN_LOOP_CLIENTS
    async with contextlib.AsyncExitStack() as stack:
        context = httpx.create_ssl_context()
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(base_url=load.base_url, timeout=load.timeout_s, limits=_NO_LIMITS, verify=context)
            )
            for _ in range(count)
        ]

        async def send(client: int, body: dict[str, Any]) -> Answer:
            path = "/v1/chat/completions" if load.chat else "/v1/completions"
            answer = await _ask(clients[client % count], path, body)
            on_done()
            return answer

        if load.rate is not None:
            gaps = [draw.expovariate(load.rate) if load.poisson else 1 / load.rate for _ in bodies[1:]]
            arrivals = list(accumulate(gaps, initial=0.0))
            return await _open_loop(bodies[first::step], arrivals[first::step], send)
        return await _closed_loop(bodies[first::step], count, send)


_Send = Callable[[int, dict[str, Any]], Awaitable[Answer]]
"""Sends a body by the client of this number."""


async def _open_loop(bodies: list[dict[str, Any]], arrivals: list[float], send: _Send) -> list[Answer]:
    async def later(delay: float, client: int, body: dict[str, Any]) -> Answer:
        await asyncio.sleep(delay)
        return await send(client, body)

    due = enumerate(zip(arrivals, bodies, strict=True))
    return list(await asyncio.gather(*(later(arrival, index, body) for index, (arrival, body) in due)))


async def _closed_loop(bodies: list[dict[str, Any]], concurrency: int, send: _Send) -> list[Answer]:
    answers: list[Answer | None] = [None] * len(bodies)
    waiting = iter(enumerate(bodies))

    async def one_client(client: int) -> None:
        for index, body in waiting:
            answers[index] = await send(client, body)

    await asyncio.gather(*(one_client(client) for client in range(concurrency)))
    return [answer for answer in answers if answer is not None]


def _body(load: Load, draw: random.Random) -> dict[str, Any]:
    prompt = draw_length(load.prompt_tokens, draw)
    body: dict[str, Any] = {
        "model": load.model,
        "max_tokens": draw_length(load.answer_tokens, draw),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # Ids from 1000 up are ordinary text in every vocabulary that is served, 8000 is within the smallest.
    ids = [draw.randint(1000, 8000) for _ in range(prompt)]
    if load.chat:
        body["messages"] = [{"role": "user", "content": " ".join(f"w{i}" for i in ids[: max(1, prompt // 4)])}]
    else:
        body["prompt"] = ids
    return body


async def _ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    answer = Answer(sent=time.monotonic())
    try:
        async with client.stream("POST", path, json=body) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = (await response.aread()).decode(errors="replace")[:500]
            else:
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        _take(answer, json.loads(line[6:]))
    except httpx.HTTPError as e:
        answer.error = f"{type(e).__name__}: {e}"
    answer.ended = time.monotonic()
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = str(event["error"].get("message", event["error"]))
        return
    for choice in event.get("choices", []):
        if choice.get("text") or choice.get("delta", {}).get("content"):
            answer.chunks.append(time.monotonic())
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]


def summarize(answers: list[Answer], ttft_slo_s: float | None = None, itl_slo_s: float | None = None) -> dict[str, Any]:
    """Rates, and quantiles of time to first token, time between tokens and whole time, in seconds.

    goodput counts the answers per second whose TTFT and mean time per later token kept the given limits.
    """
    done = [a for a in answers if a.ok]
    wall = max((a.ended for a in answers), default=0.0) - min((a.sent for a in answers), default=0.0)
    tokens = sum(a.completion_tokens for a in done)
    per_token = [(a.chunks[-1] - a.chunks[0]) / (a.completion_tokens - 1) for a in done if a.completion_tokens > 1]
    good = [
        a
        for a in done
        if a.chunks
        and (ttft_slo_s is None or a.chunks[0] - a.sent <= ttft_slo_s)
        and (itl_slo_s is None or (a.chunks[-1] - a.chunks[0]) / max(1, a.completion_tokens - 1) <= itl_slo_s)
    ]
    errors: dict[str, int] = {}
    for a in answers:
        if not a.ok:
            reason = f"HTTP {a.status}" if a.status not in (0, 200) else a.error or "stream ended without finish_reason"
            errors[reason] = errors.get(reason, 0) + 1
    return {
        "requests": len(answers),
        "completed": len(done),
        "errors": errors,
        "seconds": wall,
        "requests_per_s": len(done) / wall if wall else 0.0,
        "completion_tokens_per_s": tokens / wall if wall else 0.0,
        "prompt_tokens_per_s": sum(a.prompt_tokens for a in done) / wall if wall else 0.0,
        "goodput_per_s": len(good) / wall if wall else 0.0,
        "ttft_s": quantiles([a.chunks[0] - a.sent for a in done if a.chunks]),
        "itl_s": quantiles([b - a for answer in done for a, b in zip(answer.chunks, answer.chunks[1:], strict=False)]),
        "time_per_output_token_s": quantiles(per_token),
        "e2e_s": quantiles([a.ended - a.sent for a in done]),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p90, p99 (nearest rank), mean and max of values; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    named = {f"p{q * 100:g}": ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES}
    return {**named, "mean": statistics.fmean(ordered), "max": ordered[-1]}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.load", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first one that the server lists")
    parser.add_argument("--requests", type=int, default=64)
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=int, help="closed loop: clients at a time (default 8)")
    loop.add_argument("--rate", type=float, help="open loop: requests per second")
    parser.add_argument("--arrivals", choices=["poisson", "constant"], default="poisson", help="of the open loop")
    lengths = "N, LOW-HIGH or lognormal:MEDIAN:SIGMA"
    parser.add_argument("--prompt-tokens", type=parse_lengths, default=(128, 128), help=lengths)
    parser.add_argument("--answer-tokens", type=parse_lengths, default=(64, 64), help=lengths)
    parser.add_argument("--chat", action="store_true", help="send text to /v1/chat/completions instead of token ids")
    parser.add_argument("--ttft-slo", type=float, help="seconds; counted in goodput")
    parser.add_argument("--itl-slo", type=float, help="seconds per token; counted in goodput")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="to send from; one may be busier than the server")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--png", type=Path, help="draw it there (needs matplotlib: the extra plots)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run one load and print its summary; returns 1 when no request completed."""
    from bench.load_processes import run_in_processes  # it imports this module

    options = _parse(arguments)
    model = options.model or httpx.get(f"{options.base_url}/v1/models").json()["data"][0]["id"]
    load = Load(
        options.base_url, model, options.requests, options.concurrency or (None if options.rate else 8), options.rate,
        options.prompt_tokens, options.answer_tokens, options.chat, options.seed,
        poisson=options.arrivals == "poisson",
    )  # fmt: skip
    with tqdm(total=load.requests, unit="req", file=sys.stderr) as bar:
        answers = run_in_processes(load, options.processes, bar.update)
    summary = summarize(answers, options.ttft_slo, options.itl_slo)
    print(json.dumps(summary, indent=2))
    if options.json:
        options.json.write_text(json.dumps({"load": asdict(load), **summary}, indent=2) + "\n")
    if options.png:
        from bench.load_plot import plot_load

        pattern = f"{load.rate:g} requests/s" if load.rate else f"{load.concurrency} clients"
        plot_load(answers, f"{model}, {pattern}", options.png, (options.ttft_slo, options.itl_slo))
    return 0 if summary["completed"] else 1


if __name__ == "__main__":
    sys.exit(main())
