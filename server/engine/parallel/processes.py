"""The processes of ranks 1 to N - 1, which import what a rank needs while they wait to be told what they compute."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

from server import PACKAGE
from server.config import EngineConfig


def processes_of(config: EngineConfig, logging_options: list[str]) -> list[subprocess.Popen[bytes]]:
    """Start the processes of the other ranks where the configuration says how many there are, else none.

    Called as soon as the configuration is there, so that all processes import torch at the same time. Raises OSError.
    """
    count = config.tensor_parallel_size
    return start_processes(1 if count == "auto" else count, config.device != "cpu", logging_options)


def start_processes(count: int, on_gpus: bool, logging_options: list[str]) -> list[subprocess.Popen[bytes]]:
    """Start worker.py for ranks 1 to count - 1; each reads a WorkerSetup. logging_options: the command line's.

    on_gpus: whether each is to have a GPU of its own. Raises OSError where a process cannot be started.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, count):
            process = subprocess.Popen(
                [sys.executable, "-m", f"{PACKAGE}.engine.parallel.worker", *logging_options],
                stdin=subprocess.PIPE,
                env={**os.environ, **(_devices(rank, count) if on_gpus else {})},
            )
            processes.append(process)
    except OSError:
        kill(processes)
        raise
    return processes


def kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill processes and wait for their ends."""
    for process in processes:
        process.kill()
        process.wait()


def _devices(rank: int, count: int) -> dict[str, str]:
    """An environment in which the rank's GPU is the first one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else [str(index) for index in range(count)]
    # Where there are too few, the engine's process says so.
    return {"CUDA_VISIBLE_DEVICES": ",".join([*names[rank : rank + 1], *names[:rank], *names[rank + 1 : count]])}
