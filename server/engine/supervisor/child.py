"""The operating system's process in which an engine runs or is to run; it can be started before there is an event loop."""

from __future__ import annotations

import os
import subprocess
import sys

from server import PACKAGE
from server.config import Config
from server.threads import in_thread

ENVIRONMENT = {
    # OpenMP threads spin this often before they sleep: long enough for the gaps within a step. GNU's default
    # (milliseconds) makes every step many times slower when another process, the API's own among them, takes a core.
    "GOMP_SPINCOUNT": "20000",
    # glibc keeps the memory of a step's intermediate results for the next step. By default it gives them back and has
    # their pages made anew: thousands of page faults in every prefill on CPU, 5 to 10 % of its time.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    # torch grows its segments of a GPU's memory instead of allocating new ones of other sizes: what it holds in reserve
    # beside Qwen3-8B's tensors falls from 0.55 to 0.12 GiB, and nothing becomes slower.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
"""Environment of an engine's process, unless the user's says otherwise."""


class Child:
    """A child process that reads from a pipe; the pipe's end means that this process has gone."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """process: has a pipe as its standard input, without a buffer."""
        self._process = process

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self._process.poll()

    def write(self, line: bytes) -> None:
        """Write to its standard input. Raises BrokenPipeError when the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line)

    def close_input(self) -> None:
        """End its standard input, which asks it to leave. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def wait(self) -> int:
        """Exit code, once the process has ended."""
        if (code := self.returncode) is not None:
            return code
        return await in_thread(self._process.wait)

    def kill(self) -> None:
        """Kill the process without waiting; nothing happens when it has ended."""
        self._process.kill()


def start_child(config: Config, *, tells_imported: int | None = None) -> Child:
    """Start engine/loop.py as a process, which imports what an engine needs and waits for an EngineSetup.

    tells_imported: a pipe's end for writing. The process then stands by: it imports at the lowest priority, and writes a
    byte when that is done. Raises OSError.
    """
    process = subprocess.Popen(
        [
            sys.executable,
            *("-m", f"{PACKAGE}.engine.loop", "--log-level", config.log_level, "--log-format", config.log_format),
            *([] if tells_imported is None else ["--standby", str(tells_imported)]),
        ],
        stdin=subprocess.PIPE,
        bufsize=0,
        pass_fds=[] if tells_imported is None else [tells_imported],
        # A terminal's Ctrl-C must reach the API only, which then ends the engine in order.
        start_new_session=True,
        env={**ENVIRONMENT, **os.environ, "PYTHONUNBUFFERED": "1"},
    )
    return Child(process)
