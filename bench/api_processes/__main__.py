"""Tokens a second through 1, 2 and 4 API processes: python -m bench.api_processes, into bench/results/api-processes.json.

The engine is a stub that makes 60,000 tokens a second for 256 streams. Beside what clients saw, it gives the processor time
of the API processes, which tells what they would carry with a core each: on a machine with few cores they share these with
the clients and the stub.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.api_processes.streams import run_streams
from bench.api_processes.stub import VARIABLE
from bench.machine import cores, cpu_name, versions
from bench.processes import free_port, wait_until_ready

RESULT = Path(__file__).parents[1] / "results" / "api-processes.json"
MODEL = "smollm2-135m-instruct"
TICKS = os.sysconf("SC_CLK_TCK")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.api_processes",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument(
        "--tokens-per-s",
        default="60000,2560",
        help="of the stub. 2560: what all keep up with, so that each token is an event of its own",
    )
    parser.add_argument("--slow-tokens", type=int, default=60, help="of each stream with all rates but the first")
    parser.add_argument("--rounds", type=int, default=3, help="each with all numbers of processes, one after the other")
    parser.add_argument("--json", type=Path, default=RESULT)
    return parser.parse_args()


def main() -> int:
    """Measure and print the table."""
    options = _parse()
    counts = [int(count) for count in options.processes.split(",")]
    rates = [float(rate) for rate in options.tokens_per_s.split(",")]
    cases = [(rate, count) for rate in rates for count in counts]
    runs: dict[tuple[float, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for rate, count in cases:
            tokens = options.tokens if rate == rates[0] else options.slow_tokens
            runs[rate, count].append(_measure(count, rate, options.streams, tokens))
            print(rate, count, json.dumps(runs[rate, count][-1]), file=sys.stderr, flush=True)
    rows = [
        {"stub_tokens_per_s": rate, "api_processes": count}
        | {name: round(statistics.median(run[name] for run in found), 4) for name in found[0]}
        | {"rounds": found}
        for (rate, count), found in runs.items()
    ]
    result = {
        "processor": cpu_name(),
        "cores": cores(),
        "versions": versions(),
        "streams": options.streams,
        "tokens_per_stream": [options.tokens, options.slow_tokens],
        "rows": rows,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print({name: value for name, value in row.items() if name != "rounds"})
    return 0


def _measure(count: int, tokens_per_s: float, streams: int, length: int) -> dict[str, float]:
    port = free_port()
    environment = {
        **os.environ,
        "NF4_HTTP__API_PROCESSES": str(count),
        "NF4_HTTP__MAX_QUEUE": str(2 * streams),
        VARIABLE: str(tokens_per_s),
    }
    command = [sys.executable, "-m", "bench.api_processes.serve", "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(server, f"http://127.0.0.1:{port}/health", 180)
        run_streams(port, MODEL, streams, 8, 300)  # this warms up what is initialized at the first request
        before = _api_seconds(server.pid)
        load = os.getloadavg()[0]
        began = time.monotonic()
        answers = run_streams(port, MODEL, streams, length, 600)
        used = {pid: seconds - before[pid] for pid, seconds in _api_seconds(server.pid).items()}
    finally:
        server.terminate()
        server.wait(60)
    broken = sum(not stream.whole or stream.tokens != length for stream in answers)
    if broken:
        worst = min(answers, key=lambda stream: stream.whole and stream.tokens == length)
        raise RuntimeError(f"{broken} of {len(answers)} streams were not whole, such as {worst.tail!r}")
    tokens = sum(stream.tokens for stream in answers)
    wall = max(stream.last for stream in answers) - began
    first = sorted(stream.first - stream.sent for stream in answers)
    return {
        "tokens_per_s": tokens / wall,
        "tokens_per_api_cpu_second": tokens / sum(used.values()),
        "largest_share": max(used.values()) / sum(used.values()),
        "api_cores": sum(used.values()) / wall,
        "tokens_per_event": tokens / sum(stream.events for stream in answers),
        "ttft_s_p50": first[len(first) // 2],
        "ttft_s_max": first[-1],
        "load_average_before": load,
    }


def _api_seconds(pid: int) -> dict[int, float]:
    """Processor seconds of a server's API processes so far, by id."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    others = [int(c) for c in children if Path(f"/proc/{c}/comm").read_text().startswith("nf4-api-")]
    found = {}
    for each in (pid, *others):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        found[each] = (int(fields[11]) + int(fields[12])) / TICKS
    return found


if __name__ == "__main__":
    sys.exit(main())
