"""Clients of a stream each, whose number changes while they run, and how their requests ended."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections import Counter

import httpx

from bench.embedded_server import MODEL


class Clients:
    """Clients in a thread of their own that ask one streaming request after another, each with a prompt of its own."""

    def __init__(self, url: str, tokens: int, timeout_s: float = 240.0) -> None:
        self.ends: Counter[str] = Counter()
        """Ends of requests: "whole", or what they ended with."""
        self._url = f"{url}/v1/chat/completions"
        self._tokens = tokens
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._wanted = 0
        self._stop = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def set_count(self, count: int) -> None:
        """From now on this many requests at a time; those under way go on."""
        self._wanted = count

    def stop(self) -> Counter[str]:
        """Wait for those under way. Raises TimeoutError when some do not end."""
        self._wanted, self._stop = 0, True
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"not all requests had ended after {self._timeout_s:.0f} s")
        return self.ends

    async def _run(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False, limits=httpx.Limits()) as client:
            while tasks or not self._stop:
                while len(tasks) < self._wanted:
                    task = asyncio.create_task(self._ask(client))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await asyncio.sleep(0.02)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        number = next(self._numbers)
        body = {
            "model": MODEL, "messages": [{"role": "user", "content": f"Write about {number * 7919}."}], "stream": True,
            "stream_options": {"include_usage": True}, "max_tokens": self._tokens, "ignore_eos": True,
        }  # fmt: skip
        try:
            async with client.stream("POST", self._url, json=body) as answer:
                lines = [line async for line in answer.aiter_lines() if line]
            self.ends[self._end(answer.status_code, lines)] += 1
            if answer.status_code != 200:
                await asyncio.sleep(1)  # as Retry-After says
        except httpx.HTTPError as e:
            self.ends[type(e).__name__] += 1

    def _end(self, status: int, lines: list[str]) -> str:
        if status != 200:
            return str(json.loads("".join(lines))["error"]["code"])
        if lines[-1] != "data: [DONE]":
            return str(json.loads(lines[-1].removeprefix("data: "))["error"]["code"])
        tokens = json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"]
        return "whole" if tokens == self._tokens else f"{tokens} tokens instead of {self._tokens}"


class Watch:
    """Course of a value over time: (seconds, value) at each change."""

    def __init__(self) -> None:
        self.changes: list[tuple[float, int]] = []
        self._began = time.monotonic()

    def note(self, value: int) -> int:
        """value, noted where it is another than before."""
        if not self.changes or self.changes[-1][1] != value:
            self.changes.append((round(time.monotonic() - self._began, 1), value))
        return value
