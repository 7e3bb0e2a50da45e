"""A real server of the embedded model in a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.processes import free_port, is_ready, wait_until_ready

MODEL = "smollm2-135m-instruct"
# A start is some 15 s of processor time, of which a machine that does other things as well may have little to give.
READY_S = 300.0
RUNNING_S = 60.0


@dataclass
class Server:
    """A running server of the embedded model."""

    url: str
    process: subprocess.Popen[bytes]

    def ready(self) -> bool:
        """Whether /health answers 200."""
        return is_ready(f"{self.url}/health")

    def engine(self) -> int:
        """The engine's process id; KeyError where there is none."""
        return self.processes()["nf4-engine"]

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def wait_until_running(self, count: int) -> None:
        """Wait until this many sequences run at once. Raises RuntimeError after RUNNING_S."""
        end = time.monotonic() + RUNNING_S
        while self.metric("nf4_num_requests_running") < count:
            if time.monotonic() > end:
                raise RuntimeError(f"{count} sequences did not run at once")
            time.sleep(0.02)

    def processes(self) -> dict[str, int]:
        """Process ids by name: `api`, `nf4-engine` and, where one stands by, `nf4-standby` (before: `nf4-imports`)."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {"api": pid, **{Path(f"/proc/{c}/comm").read_text().strip(): int(c) for c in children}}

    @staticmethod
    def resident(pid: int) -> int:
        """Resident bytes of a process."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    def memory(self) -> int:
        """Resident bytes of the API process and the engine together."""
        return sum(map(self.resident, (self.process.pid, self.engine())))


@contextmanager
def serving(**settings: object) -> Iterator[Server]:
    """A server that is ready, with these settings as environment variables; NF4_ is put before their names."""
    port = free_port()
    variables = {f"NF4_{key.upper()}": str(value) for key, value in settings.items()}
    command = [sys.executable, "-m", "server", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command, env={**os.environ, **variables})
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        wait_until_ready(process, f"{server.url}/health", READY_S)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(90)
