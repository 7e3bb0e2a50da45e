"""Send a load from several processes, because httpx's clients need more processor time for a token than the server does.

As a program (python -m bench.load.processes) this is one of them: it reads a Load as JSON and prints its answers as JSON.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import msgspec

from bench.load.client import Answer, Load, run_load


def run_in_processes(load: Load, processes: int, on_done: Callable[[], object] = lambda: None) -> list[Answer]:
    """Send a load from this many processes, which begin together. The answers are in the order of sending.

    on_done is called once for each answer; with several processes that is when one of them has all its answers. Raises
    RuntimeError when a process fails.
    """
    shares = _shares(load, processes)
    if len(shares) == 1:
        return asyncio.run(run_load(load, on_done))
    command = [sys.executable, "-m", "bench.load.processes"]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in shares
    ]
    answers: list[Answer] = []
    try:
        for worker, share in zip(workers, shares, strict=True):
            _tell(worker, msgspec.json.encode(share).decode())
        for worker in workers:
            _hear(worker)
        for worker in workers:
            _tell(worker, "go")
        for worker in workers:
            found = msgspec.json.decode(_hear(worker), type=list[Answer])
            answers += found
            for _ in found:
                on_done()
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    return sorted(answers, key=lambda answer: answer.sent)


def _shares(load: Load, processes: int) -> list[Load]:
    """Divide the requests, with their arrivals, and the clients among the processes.

    There are fewer processes where one would be left without a client.
    """
    clients = load.requests if load.rate is not None else load.concurrency or 1
    count = min(processes, load.requests, clients)
    return [
        replace(load, concurrency=clients // count + (index < clients % count), share=(index, count))
        for index in range(count)
    ]


def _tell(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdin is not None
    try:
        worker.stdin.write(line + "\n")
    except BrokenPipeError:
        raise _ended(worker) from None


def _hear(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise _ended(worker)
    return line


def _ended(worker: subprocess.Popen[str]) -> RuntimeError:
    return RuntimeError(f"a process that sends the load ended with exit code {worker.wait()}")


def _work() -> None:
    load = msgspec.json.decode(input(), type=Load)
    print("ready", flush=True)
    input()
    print(msgspec.json.encode(asyncio.run(run_load(load))).decode(), flush=True)


if __name__ == "__main__":
    _work()
