"""The HTTP client of a load: what is sent, closed loop or open, and what each request's client saw."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import httpx

from bench.load.lengths import Lengths, sample_length

_OPEN_LOOP_CLIENTS = 32
_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=1000)


@dataclass(frozen=True)
class Load:
    """Load that is sent. Lengths are in tokens, rate in requests per second."""

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
    """Whether the requests of an open loop arrive at random; otherwise one arrives every 1 / rate seconds."""
    share: tuple[int, int] = (0, 1)
    """(first, step): this process sends the requests first, first + step, ... of all, at the times they have in the whole
    load. concurrency is then that of this process."""


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
    rng = random.Random(load.seed)
    first, step = load.share
    bodies = [_body(load, rng) for _ in range(load.requests)]
    # httpx looks through all connections of a client at every request, so several clients share the connections.
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
            gaps = [rng.expovariate(load.rate) if load.poisson else 1 / load.rate for _ in bodies[1:]]
            arrivals = list(accumulate(gaps, initial=0.0))
            return await _open_loop(bodies[first::step], arrivals[first::step], send)
        return await _closed_loop(bodies[first::step], count, send)


_Send = Callable[[int, dict[str, Any]], Awaitable[Answer]]
"""Sends a body through the client with this number."""


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


def _body(load: Load, rng: random.Random) -> dict[str, Any]:
    prompt = sample_length(load.prompt_tokens, rng)
    body: dict[str, Any] = {
        "model": load.model,
        "max_tokens": sample_length(load.answer_tokens, rng),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # Ids from 1000 up are ordinary text in every vocabulary that is served, 8000 is within the smallest.
    ids = [rng.randint(1000, 8000) for _ in range(prompt)]
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
                        _read_event(answer, json.loads(line[6:]))
    except httpx.HTTPError as e:
        answer.error = f"{type(e).__name__}: {e}"
    answer.ended = time.monotonic()
    return answer


def _read_event(answer: Answer, event: dict[str, Any]) -> None:
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
