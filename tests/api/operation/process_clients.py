"""Clients of a server with several API processes: which process has a connection, a client for each, and endless streams."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.api.conftest import chat_body
from tests.conftest import RunningServer

KEYS = ("one", "two")
CHAT = "/v1/chat/completions"
LONG = {"max_tokens": 60_000, "ignore_eos": True, "stream": True}


def client(server: RunningServer, key: str = KEYS[0]) -> httpx.Client:
    return server.client(headers={"Authorization": f"Bearer {key}"})


def processes(server: RunningServer) -> list[int]:
    """Ids of the processes that answer HTTP, the first one's first."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(int(c) for c in children if Path(f"/proc/{c}/comm").read_text().startswith("nf4-api-"))]


def owner(server: RunningServer, http: httpx.Client) -> int:
    """Id of the process that a client's one connection is with."""
    assert http.get("/version").status_code == 200
    (connection,) = http._transport._pool.connections  # type: ignore[attr-defined]
    ours = connection._connection._network_stream.get_extra_info("client_addr")[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        ports = [int(address.rpartition(":")[2], 16) for address in fields[1:3]]
        if ports == [httpx.URL(server.base_url).port, ours]:
            wanted = f"socket:[{fields[9]}]"
            for pid in processes(server):
                if any(_target(file) == wanted for file in Path(f"/proc/{pid}/fd").iterdir()):
                    return pid
    raise AssertionError("nobody has the connection")


def _target(file: Path) -> str:
    try:
        return os.readlink(file)
    except OSError:
        return ""


@contextmanager
def one_each(server: RunningServer, key: str = KEYS[0]) -> Iterator[dict[int, httpx.Client]]:
    """A client with a connection to each process, by the process' id."""
    with ExitStack() as stack:
        found: dict[int, httpx.Client] = {}
        for _ in range(100):
            http = client(server, key)
            pid = owner(server, http)
            if pid in found:
                http.close()
            else:
                stack.callback(http.close)
                found[pid] = http
            if len(found) == 3:
                break
        assert sorted(found) == sorted(processes(server))
        yield found


class Stream:
    """A stream that goes on until it is ended."""

    def __init__(self, http: httpx.Client, **options: Any) -> None:
        self._stack = ExitStack()
        body = chat_body(**(LONG | options))
        self.answer = self._stack.enter_context(http.stream("POST", CHAT, json=body))
        self.status = self.answer.status_code
        self.lines = (line for line in self.answer.iter_lines() if line)
        if self.status == 200:
            next(self.lines)

    def rest(self) -> list[str]:
        return list(self.lines)

    def close(self) -> None:
        self._stack.close()
