"""Servers that a benchmark starts: a port for each, and the wait until it answers."""

from __future__ import annotations

import socket
import subprocess
import time

import httpx


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_ready(url: str) -> bool:
    """Whether a GET of url is answered with 200."""
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def wait_until_ready(process: subprocess.Popen[bytes], url: str, limit_s: float) -> None:
    """Wait until is_ready(url). Raises RuntimeError when limit_s is over or process ends, with what it wrote to its pipe."""
    end = time.monotonic() + limit_s
    while not is_ready(url):
        if process.poll() is not None:
            written = process.stderr.read().decode() if process.stderr else ""
            raise RuntimeError(f"the process for {url} ended with status {process.returncode}. {written}".rstrip())
        if time.monotonic() > end:
            raise RuntimeError(f"{url} was not ready after {limit_s:.0f} s")
        time.sleep(0.05)
