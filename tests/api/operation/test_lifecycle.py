"""A server of its own: loading, a full queue, clients that leave, an engine that dies, the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import MODEL, chat_body, metric, openai_client, user
from tests.conftest import RunningServer, engine_pid, start_server, until

QUEUE = 3
STALLED_S = 4
LONG = {"messages": user("Tell me a very long story."), "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def own(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Yielded while it is still loading."""
    limits = {"max_queue": QUEUE, "stalled_client_timeout_s": STALLED_S}
    with start_server(tmp_path_factory.mktemp("lifecycle") / "log", config={"http": limits}, loading=True) as running:
        yield running


@pytest.fixture
def http(own: RunningServer) -> Iterator[httpx.Client]:
    with own.client() as client:
        yield client


def ready(http: httpx.Client) -> bool:
    return http.get("/health").status_code == 200


def aborted(http: httpx.Client) -> float:
    return metric(http, "nf4_request_success_total", finished_reason="abort")


def idle(http: httpx.Client) -> bool:
    return metric(http, "nf4_num_requests_running") + metric(http, "nf4_kv_cache_usage_perc") == 0


def read_until_tokens(lines: Iterator[str], count: int) -> None:
    seen = 0
    for line in lines:
        seen += '"content":' in line
        if seen > count:
            return
    raise AssertionError("the stream ended early")


def test_health_tells_about_loading(own: RunningServer, http: httpx.Client) -> None:
    health = http.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "loading"
    assert health.json()["stage"]
    assert 1 <= health.json()["step"] <= health.json()["steps"]
    assert health.json()["seconds"] >= 0
    refused = http.post("/v1/chat/completions", json=chat_body())
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "model_loading"
    assert int(refused.headers["retry-after"]) >= 1
    # What is wrong with a request is wrong at any time.
    assert http.post("/v1/chat/completions", json=chat_body(n=0)).status_code == 400
    assert "nf4_engine_up" in http.get("/metrics").text
    until(lambda: ready(http))
    until(lambda: f"Serving {MODEL} on {own.base_url}" in own.log.read_text())


def test_second_server_on_the_port_says_so(own: RunningServer) -> None:
    port = own.base_url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "server", "--port", port], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert (
        done.stderr == f"error: 127.0.0.1:{port}: Address already in use; --port N takes another, --port 0 a free one\n"
    )


def test_client_that_leaves_a_stream_frees_the_engine(http: httpx.Client) -> None:
    aborts = aborted(http)
    with http.stream("POST", "/v1/chat/completions", json=chat_body(stream=True, n=2, **LONG)) as answer:
        read_until_tokens(answer.iter_lines(), 4)
    until(lambda: aborted(http) == aborts + 2)
    until(lambda: idle(http))


def sent(own: RunningServer, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which a request has been sent, and nothing been read."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    host, port = own.base_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


def test_client_that_leaves_before_the_whole_answer_frees_the_engine(own: RunningServer, http: httpx.Client) -> None:
    aborts = aborted(http)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 4000, "ignore_eos": True}
    with sent(own, "/v1/completions", body):
        until(lambda: metric(http, "nf4_num_requests_running") == 1)
    until(lambda: aborted(http) == aborts + 1)
    until(lambda: idle(http))
    assert metric(http, "nf4_request_rejections_total", reason="client_disconnected") >= 1


def test_client_that_reads_nothing_disturbs_nobody(own: RunningServer, http: httpx.Client) -> None:
    aborts = aborted(http)
    with sent(own, "/v1/chat/completions", chat_body(stream=True, **LONG)) as connection:
        until(lambda: metric(http, "nf4_num_requests_running") == 1)
        assert http.post("/v1/chat/completions", json=chat_body()).status_code == 200
        # A reset, as from a machine that vanished.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    until(lambda: aborted(http) == aborts + 1)
    until(lambda: idle(http))


def test_client_that_stopped_reading_counts_as_gone(own: RunningServer, http: httpx.Client) -> None:
    host, port = own.base_url.removeprefix("http://").split(":")
    # Events large enough to fill the sockets' buffers before the answer ends.
    body = json.dumps(chat_body(stream=True, n=QUEUE, logprobs=True, top_logprobs=20, **LONG)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: metric(http, "nf4_num_requests_running") == QUEUE)
        # It has the connection open still.
        until(lambda: idle(http), 180)


def test_deadline_of_the_clients_own(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 4000, "ignore_eos": True}
    begun, tokens = time.monotonic(), metric(http, "nf4_generation_tokens_total")
    late = http.post("/v1/completions", json=body, headers={"X-Request-Timeout": "1.5"})
    assert time.monotonic() - begun > 1.4
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    until(lambda: idle(http))
    assert metric(http, "nf4_generation_tokens_total") - tokens < 4000
    for wrong in ("soon", "0", "-1", "inf", "nan", ""):
        refused = http.post("/v1/completions", json=body, headers={"X-Request-Timeout": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Request-Timeout"), wrong


def test_full_queue_gets_429(own: RunningServer, http: httpx.Client) -> None:
    with http.stream("POST", "/v1/chat/completions", json=chat_body(stream=True, n=QUEUE, **LONG)) as answer:
        lines = answer.iter_lines()  # kept, as httpx closes the connection with it
        read_until_tokens(lines, 2)
        refused = http.post("/v1/chat/completions", json=chat_body())
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        with openai_client(own.base_url) as client, pytest.raises(openai.RateLimitError):
            client.chat.completions.create(**chat_body())
        assert metric(http, "nf4_request_rejections_total", reason="queue_full") == 2
        assert http.get("/health").status_code == 200
    never = http.post("/v1/chat/completions", json=chat_body(n=QUEUE + 1))
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
    until(lambda: http.post("/v1/chat/completions", json=chat_body(max_tokens=1)).status_code == 200)


def test_dying_engine_ends_streams_with_an_error_and_comes_back(own: RunningServer, http: httpx.Client) -> None:
    with openai_client(own.base_url) as client:
        options = {key: value for key, value in LONG.items() if key != "ignore_eos"}
        stream = client.chat.completions.create(**chat_body(stream=True, extra_body={"ignore_eos": True}, **options))
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(http.post, "/v1/chat/completions", json=chat_body(**LONG))
            for number, _ in enumerate(stream):
                if number == 4:
                    break
            until(lambda: metric(http, "nf4_num_requests_running") == 2)
            os.kill(engine_pid(own.process.pid), signal.SIGKILL)
            with pytest.raises(openai.APIError, match="engine"):
                for _ in stream:
                    pass
            failed = whole.result(60)
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "engine_error"
    health = http.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "restarting"
    refused = http.post("/v1/chat/completions", json=chat_body())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
    until(lambda: ready(http))
    assert http.get("/health").json()["engine_restarts"] == 1
    assert metric(http, "nf4_engine_restarts_total") == 1
    assert http.post("/v1/chat/completions", json=chat_body()).status_code == 200


def test_sigterm_lets_streams_end(own: RunningServer, http: httpx.Client) -> None:
    """The last test of this server."""
    result: dict[str, Any] = {}
    body = chat_body(stream=True, messages=user("Tell me a story."), max_tokens=60, ignore_eos=True)
    body["stream_options"] = {"include_usage": True}
    begun = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{own.base_url}/v1/chat/completions", json=body, timeout=60) as answer:
            lines = []
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()
            result["lines"] = [line for line in lines if line]

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    engine = engine_pid(own.process.pid)
    own.process.send_signal(signal.SIGTERM)
    reader.join(60)
    assert result["lines"][-1] == "data: [DONE]"
    # All of it, in however many events.
    (usage,) = [line for line in result["lines"] if '"completion_tokens":' in line]
    assert '"completion_tokens":60' in usage
    assert own.process.wait(60) == 0
    assert not Path(f"/proc/{engine}").exists()
    assert "Traceback" not in own.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "/nowhere"], "/nowhere: no such folder"),
        (["--port", "99999"], "http.port"),
        (["--tls-cert-file", "/nowhere/c", "--tls-key-file", "/nowhere/k"], "tls_cert_file"),
    ],
)
def test_start_that_cannot_work_ends_with_one_line(arguments: list[str], reason: str) -> None:
    command = [sys.executable, "-m", "server", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.rest
def test_damaged_checkpoint_ends_with_one_line(embedded_folder: Path, tmp_path: Path) -> None:
    for file in embedded_folder.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    command = [sys.executable, "-m", "server", "--port", "0", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}")
