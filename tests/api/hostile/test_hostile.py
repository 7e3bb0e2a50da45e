"""Hostile requests while another client's stream goes on: none takes the server down, none holds the stream up."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import chat_body, metric, user
from tests.conftest import RunningServer

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
# What the server may compute between two tokens of a stream beside one of these, in seconds of a core: other work on the
# machine does not count.
MAX_PAUSE_S = 5.0


def nested(depth: int, opening: str, closing: str, inner: str = "") -> str:
    return opening * depth + inner + closing * depth


def chat_with(fields: str) -> bytes:
    """A chat's body with more fields, as text: nothing of ours has to be able to write them."""
    return (json.dumps(chat_body())[:-1] + f", {fields}}}").encode()


def deep_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def forms(form: dict[str, Any]) -> bytes:
    return json.dumps(chat_body(structured_outputs=form, max_tokens=4)).encode()


def hundred_megabytes() -> Iterator[bytes]:
    for _ in range(1600):
        yield b" " * 2**16


def branching(depth: int) -> dict[str, Any]:
    """2 ** depth ways through definitions that each name the next one twice."""
    definitions: dict[str, Any] = {f"d{depth}": {"type": "null"}}
    for i in range(depth):
        definitions[f"d{i}"] = {
            "anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}}]
        }
    return {"$ref": "#/$defs/d0", "$defs": definitions}  # fmt: skip


BODIES: dict[str, Callable[[], bytes | Iterator[bytes]]] = {
    "100 MB, announced": lambda: b" " * 100 * 2**20,
    "100 MB, in chunks": hundred_megabytes,
    "many small messages": lambda: json.dumps(chat_body(messages=user("") * 60_000), separators=(",", ":")).encode(),
    "one long word": lambda: json.dumps(chat_body(messages=user("a" * 4_000_000))).encode(),
    "long unicode": lambda: json.dumps(chat_body(messages=user("\u0301" * 600_000))).encode(),
    "deep lists": lambda: chat_with('"x": ' + nested(200_000, "[", "]")),
    "deep objects": lambda: chat_with('"x": ' + nested(200_000, '{"a":', "}", "1")),
    "deep content": lambda: chat_with('"messages": ' + nested(150, '[{"role":"user","content":', "}]", '"a"')),
    "deep schema of 100": lambda: forms({"json": deep_schema(60)}),
    "deep schema of 50000": lambda: chat_with(
        '"guided_json": ' + nested(50_000, '{"properties":{"a":', "}}", '{"type":"null"}')
    ),
    "branching schema": lambda: forms({"json": branching(40)}),
    "many patterns": lambda: forms(
        {"json": {"anyOf": [{"type": "string", "pattern": f"^(a|b)*{i}$"} for i in range(2000)]}}
    ),
    "endless reference": lambda: forms({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}),
    "far reference": lambda: forms({"json": {"$ref": "http://127.0.0.1:1/schema.json"}}),
    "catastrophic regex": lambda: forms({"regex": "(a+)+(a+)+(a+)+$" * 20}),
    "counted regex": lambda: forms({"regex": "((a{1,1000}){1,1000}){1,1000}"}),
    "lookaround": lambda: forms({"regex": r"^(?=(a+)+$)\1"}),
    "alternatives": lambda: forms({"regex": "|".join("a" * i + "b?" for i in range(600))}),
    "ambiguous grammar": lambda: forms({"grammar": 'start: a\na: a a | a a a | "x" | ""'}),
    "deep regex": lambda: forms({"regex": nested(5000, "(", ")", "a")}),
    "long choices": lambda: forms({"choice": ["x" * 200] * 1000}),
    "deep grammar": lambda: forms({"grammar": "start: " + nested(20_000, "(", ")", '"a"')}),
    "NUL": lambda: json.dumps(chat_body(messages=user("a\0b" * 50), stop="\0", user="\0")).encode(),
    "long numbers": lambda: chat_with('"seed": ' + "9" * 100_000),
    "many keys": lambda: chat_with(", ".join(f'"k{i}": 1' for i in range(100_000))),
    "the same key": lambda: chat_with(", ".join('"seed": 1' for _ in range(100_000))),
    "many stops": lambda: json.dumps(chat_body(stop=["a" * 512] * 16, max_tokens=8)).encode(),
    "template settings": lambda: chat_with('"chat_template_kwargs": {"messages": null, "bos_token": "x"}'),
}  # fmt: skip


class Watched(threading.Thread):
    """A stream that is read to its end, and the most that the server's first process computed between its events."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self._base_url = server.base_url
        self._times = Path(f"/proc/{server.process.pid}/stat")
        self.begun = threading.Event()
        self.longest = 0.0
        self.ending: str | None = None

    def run(self) -> None:
        body = chat_body(messages=user("Count."), max_tokens=4000, ignore_eos=True, stream=True)
        with httpx.stream("POST", self._base_url + CHAT, json=body, timeout=60, trust_env=False) as answer:
            last = self._computed()
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                now = self._computed()
                if self.begun.is_set():
                    self.longest = max(self.longest, now - last)
                last = now
                self.begun.set()
                self.ending = line
                if self.stopped:
                    return

    stopped = False

    def _computed(self) -> float:
        user, system = self._times.read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def watched(server: RunningServer) -> Iterator[Watched]:
    stream = Watched(server)
    stream.start()
    assert stream.begun.wait(60)
    yield stream
    assert stream.is_alive() or stream.ending == "data: [DONE]"
    stream.stopped = True
    stream.join(60)
    assert not stream.is_alive()


@pytest.mark.parametrize("name", list(BODIES))
def test_another_stream_goes_on(http: httpx.Client, server: RunningServer, name: str) -> None:
    content = BODIES[name]()
    with watched(server) as stream:
        try:
            status = http.post(CHAT, content=content, headers=JSON).status_code
        except httpx.WriteError:  # refused before all of it was sent
            status = 413
        time.sleep(0.05)
    assert status in (200, 400, 413), status
    assert stream.longest < MAX_PAUSE_S
    assert metric(http, "nf4_request_rejections_total", reason="internal_error") == 0
    assert metric(http, "nf4_engine_restarts_total") == 0
    assert http.post(CHAT, json=chat_body(max_tokens=1)).status_code == 200
