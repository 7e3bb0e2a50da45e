"""Decode on CPU while other work takes the cores: threads that spin or sleep at barriers, one thread, the engine's choice.

    python -m bench.contention         # table, and bench/results/contention.json

The states run interleaved in one engine, one sequence of the embedded model, for seconds each, beside processes that only
compute (--busy 0,2,4,14). Other work of the machine counts, too: the load average is in the result, and only ratios within
one row mean anything. The first round, in which the engine chooses, is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.machine import cores, cpu_name, current_commit, versions
from server.engine.contention import Barriers, waited_seconds
from server.engine.supervisor.child import ENVIRONMENT

RESULT = Path(__file__).resolve().parent / "results" / "contention.json"
STATES = ("one thread", "spin", "sleep", "chosen")
AIM = 0.8
"""Share of the best state's speed that the engine's choice should reach."""


def main() -> int:
    """Measure in a child process, which has the engine's environment; exit status 1 if the choice misses its aim."""
    parser = argparse.ArgumentParser(prog="python -m bench.contention", description=__doc__)
    parser.add_argument("--busy", default="0,2,4,14", help="numbers of busy processes")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a state in a round")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps([_row(int(busy), options.rounds, options.seconds) for busy in options.busy.split(",")]))
        return 0
    done = subprocess.run(
        [sys.executable, "-m", "bench.contention", *sys.argv[1:], "--child"],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout.splitlines()[-1])
    report = {
        "device": cpu_name(),
        "threads": cores(),
        "commit": current_commit(),
        "versions": versions(),
        "unit": "tokens per second, median of the rounds",
        "rows": rows,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    for row in rows:
        speeds = "  ".join(f"{state} {row[state]:.1f}" for state in STATES)
        print(f"{row['busy']:2} busy processes (load {row['load']:.1f}): {speeds}")
    return int(any(row["chosen"] < AIM * max(row[state] for state in STATES) for row in rows))


class _Decode:
    """An engine that decodes one sequence for ever."""

    def __init__(self) -> None:
        from server.checkpoint.source import resolve_checkpoint
        from server.config import EMBEDDED_MODEL, EngineConfig, default_cache_dir
        from server.engine.core import Engine
        from server.engine.start import load_runner

        folder = resolve_checkpoint(EMBEDDED_MODEL, default_cache_dir(), lambda *_: None)
        config = EngineConfig(kv_cache_bytes=1 << 27)
        self._engine = Engine(load_runner(folder, config, lambda *_: None), config)
        self._count = 0

    def step(self) -> None:
        """One decode step."""
        from server.types import GenerateRequest, SamplingParams

        if not self._engine.has_work:
            self._count += 1
            sampling = SamplingParams(max_tokens=500, temperature=0.0)
            self._engine.add(GenerateRequest(str(self._count), [1, 500 + self._count, 600, 700], sampling))
            self._engine.step()
        self._engine.step()


class _Clock:
    """The time, and what threads have waited, in one state alone."""

    def __init__(self) -> None:
        self._runs = False
        self._since = 0.0
        self._seconds = 0.0
        self._waited: dict[int, float] = {}
        self._at_start: dict[int, float] = {}

    def runs(self, runs: bool) -> None:
        """Whether time counts from here on."""
        if self._runs:
            self._seconds, self._waited = self.now(), self.waited()
        self._runs, self._since, self._at_start = runs, time.monotonic(), waited_seconds()

    def now(self) -> float:
        """Seconds."""
        return self._seconds + time.monotonic() - self._since

    def waited(self) -> dict[int, float]:
        """See waited_seconds()."""
        found = waited_seconds()
        return {
            task: self._waited.get(task, 0.0) + found[task] - self._at_start.get(task, found[task]) for task in found
        }


def _row(busy: int, rounds: int, seconds: float) -> dict[str, Any]:
    import torch

    from nf4_kernels import cpu

    decode = _engine()
    clock = _Clock()
    barriers = Barriers(waited=clock.waited, now=clock.now)
    speeds: dict[str, list[float]] = {state: [] for state in STATES}
    with _busy(busy):
        for number in range(rounds + 1):
            for state in STATES:
                torch.set_num_threads(1 if state == "one thread" else cores())
                cpu.sleep_at_barriers(state == "sleep" or (state == "chosen" and barriers.sleeps))
                clock.runs(state == "chosen")
                began, steps = time.monotonic(), 0
                while time.monotonic() < began + seconds:
                    if state == "chosen":
                        barriers.check()
                    decode.step()
                    steps += 1
                clock.runs(False)
                if number:  # in the first round the choice is made
                    speeds[state].append(steps / (time.monotonic() - began))
        load = os.getloadavg()[0]
    return {
        "busy": busy,
        "load": round(load, 1),
        **{state: round(statistics.median(found), 1) for state, found in speeds.items()},
    }


_kept: list[_Decode] = []


def _engine() -> _Decode:
    if not _kept:
        _kept.append(_Decode())
    return _kept[0]


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Processes that compute and do nothing else."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(1)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
