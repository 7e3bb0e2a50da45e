"""Processor seconds of this process' descendants, by what they are: Ray's own processes, replicas, engines, servers."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
# What a command line begins with or has in it, and what that process is called here.
_KINDS = {
    "ray::ProxyActor": "Ray's HTTP proxy",
    ":Ingress": "our ingress",
    ":Engine": "replica",
    "ray::ServeController": "Ray's controller",
    "haproxy": "TCP balancer",
    "server.engine.loop": "engine",
    "server --port": "server",
    "/raylet": "raylet",
    "gcs_server": "gcs",
}


def seconds_by_kind() -> dict[str, float]:
    """So far, of all processes below this one that live; what they are, or "Ray's others".

    An engine below a replica is "engine on Ray", one below a server "engine"; an HAProxy that this process has not started
    itself is "Ray's HAProxy".
    """
    found: dict[str, float] = defaultdict(float)
    kinds = {os.getpid(): ""}
    processes = sorted(_processes(), key=lambda process: process[0])
    while True:
        below = [process for process in processes if process[1] in kinds and process[0] not in kinds]
        if not below:
            return found
        for pid, parent, seconds in below:
            kind = _kind(pid)
            if kind == "engine" and kinds[parent] == "replica":
                kind = "engine on Ray"
            elif kind == "TCP balancer" and kinds[parent]:
                kind = "Ray's HAProxy"
            kinds[pid] = kind
            found[kinds[pid]] += seconds


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The seconds by which each kind grew."""
    return {kind: seconds - before.get(kind, 0.0) for kind, seconds in after.items()}


def _processes() -> list[tuple[int, int, float]]:
    """(id, parent's id, seconds) of each process of this machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        found.append((int(folder.name), int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS))
    return found


def _kind(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        command = ""
    return next((name for mark, name in _KINDS.items() if mark in command), "Ray's others")
