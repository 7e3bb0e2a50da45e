"""Three API processes beside one engine: what is asked of any of them counts in all."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from server.config import ConfigError
from server.config.sources import load_config
from tests.api.conftest import chat_body, metric, user
from tests.api.operation.process_clients import CHAT, KEYS, Stream, client, one_each, processes
from tests.clients.random_model import write_random_model
from tests.conftest import RunningServer, engine_pid, start_server, until

pytestmark = pytest.mark.rest

LIMIT = 6


@pytest.fixture(scope="module")
def server(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("processes")
    http = {"api_processes": 3, "api_keys": KEYS, "max_requests_per_key": 4, "max_queue": LIMIT, "max_connections": 40}
    config = write_random_model(folder / "model", embedded_folder, http)
    settings = json.loads(config.read_text())
    settings["engine"] |= {"allow_runtime_lora": True, "embeddings": False}
    config.write_text(json.dumps(settings))
    with start_server(folder / "log", config=config) as running:
        yield running


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with client(server) as http:
        yield http


def test_all_processes_answer_and_any_tells_of_all(server: RunningServer) -> None:
    with one_each(server) as clients:
        readers = list(clients.values())
        before = metric(readers[0], "nf4_generation_tokens_total")
        answered = metric(readers[0], "nf4_http_requests_total", route=CHAT, status="200")
        texts = set()
        for http in readers:
            answer = http.post(CHAT, json=chat_body(max_tokens=7, ignore_eos=True))
            assert answer.status_code == 200
            texts.add(answer.json()["choices"][0]["message"]["content"])
        assert len(texts) == 1
        for http in readers:
            assert metric(http, "nf4_generation_tokens_total") == before + 21
            assert metric(http, "nf4_http_requests_total", route=CHAT, status="200") == answered + 3
            assert metric(http, "nf4_api_processes") == 3
            assert metric(http, "nf4_http_requests_in_flight") == 1
            assert metric(http, "nf4_engine_up") == 1
            assert http.get("/metrics").text.count("process_resident_memory_bytes{") == 3
            assert http.get("/get_load").json()[0]["num_reqs"] == 0
        assert len({http.get("/v1/models").text for http in readers}) == 1
        assert len({http.get("/health").text for http in readers}) == 1


def test_a_metric_s_buckets_are_those_of_all(server: RunningServer) -> None:
    with one_each(server) as clients:
        for http in clients.values():
            http.post(CHAT, json=chat_body())
        lines = client(server).get("/metrics").text.splitlines()
    name = "nf4_e2e_request_latency_seconds"
    buckets = [float(line.split()[-1]) for line in lines if line.startswith(f"{name}_bucket")]
    (count,) = [float(line.split()[-1]) for line in lines if line.startswith(f"{name}_count")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == count >= 3
    assert len([line for line in lines if line.startswith(f"# TYPE {name} ")]) == 1


def test_the_queue_is_one(server: RunningServer, http: httpx.Client) -> None:
    with one_each(server) as one, one_each(server, KEYS[1]) as two:
        streams = [Stream(http) for http in (*one.values(), *two.values())]
        assert [stream.status for stream in streams] == [200] * LIMIT
        with one_each(server) as third:
            for each in third.values():
                refused = each.post(CHAT, json=chat_body())
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
                assert int(refused.headers["retry-after"]) >= 1
            streams[0].close()
            until(lambda: metric(http, "nf4_num_requests_running") == LIMIT - 1)
            # Whichever process had it: there is room in all.
            assert [each.post(CHAT, json=chat_body()).status_code for each in third.values()] == [200, 200, 200]
        for stream in streams:
            stream.close()
    until(lambda: metric(http, "nf4_num_requests_running") == 0)


def test_a_key_s_limit_is_one(server: RunningServer, http: httpx.Client) -> None:
    with one_each(server) as one, client(server) as fourth, client(server, KEYS[1]) as other:
        streams = [Stream(http) for http in (*one.values(), fourth)]
        assert [stream.status for stream in streams] == [200] * 4
        # Twelve new connections, of which each process has some.
        for _ in range(12):
            with client(server) as more:
                refused = more.post(CHAT, json=chat_body())
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit")
        assert other.post(CHAT, json=chat_body()).status_code == 200
        for stream in streams:
            stream.close()
        until(lambda: http.get("/v1/models").status_code == 200)


def test_connections_are_counted_together(server: RunningServer) -> None:
    """Connections beyond the limit, with a request under way on each, get 503, whichever process has them."""
    with ExitStack() as stack:
        until(lambda: _are_taken(server, 40, stack))
        for _ in range(6):
            assert b"503 Service Unavailable" in stack.enter_context(_connection(server)).recv(4096)
    until(lambda: _answers(server))


def _are_taken(server: RunningServer, count: int, stack: ExitStack) -> bool:
    """Whether the server takes so many connections, which the stack then holds, each with a request under way.

    It does not where a process has yet to see that connections of earlier tests are closed, or where one of these waited so
    long for its place that it was closed without an answer, as connections are that send nothing.
    """
    with ExitStack() as opened:
        sockets = [opened.enter_context(_connection(server)) for _ in range(count)]
        try:
            for each in sockets:
                each.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
            # Once it is refused for its key, a process has taken the connection, however busy the machine is; the rest of
            # the body is still to come.
            answers = [each.recv(4096) for each in sockets]
        except ConnectionError:
            return False
        assert all(answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 503")) or answer == b"" for answer in answers)
        if not all(answer.startswith(b"HTTP/1.1 401") for answer in answers):
            return False
        stack.push(opened.pop_all())
        return True


def _connection(server: RunningServer) -> socket.socket:
    url = httpx.URL(server.base_url)
    return socket.create_connection((url.host, url.port or 0), timeout=60)


def _answers(server: RunningServer) -> bool:
    with client(server) as http:
        return http.get("/version").status_code == 200


def test_adapters_are_known_to_all_at_once(server: RunningServer, tmp_path: Path) -> None:
    _write_adapter(tmp_path)
    with one_each(server) as clients:
        for http in clients.values():
            loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "extra", "lora_path": str(tmp_path)})
            assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'extra' added successfully.")
            for each in clients.values():
                assert "extra" in [model["id"] for model in each.get("/v1/models").json()["data"]]
                assert each.post(CHAT, json=chat_body(model="extra")).status_code == 200
            again = http.post("/v1/load_lora_adapter", json={"lora_name": "extra", "lora_path": str(tmp_path)})
            assert (again.status_code, again.json()["error"]["code"]) == (400, "already_loaded")
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": "extra"}).status_code == 200
            assert [each.post(CHAT, json=chat_body(model="extra")).status_code for each in clients.values()] == [
                404
            ] * 3
    with server.client() as nobody:
        for _ in range(6):
            assert nobody.post("/v1/unload_lora_adapter", json={"lora_name": "extra"}).status_code == 401


def _write_adapter(folder: Path) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {"lora_A": np.ones((4, 64), np.float32), "lora_B": np.ones((64, 4), np.float32)}
    save_file(
        {f"{layer}.{name}.weight": factor for name, factor in factors.items()}, folder / "adapter_model.safetensors"
    )


def test_a_process_that_is_killed(server: RunningServer) -> None:
    """Its clients lose their connections, nobody else does; what it held is free, and another takes its place."""
    with one_each(server) as clients:
        first, victim, other = sorted(clients, key=processes(server).index)
        tokens = metric(clients[first], "nf4_generation_tokens_total")
        for http in clients.values():
            assert http.post(CHAT, json=chat_body(max_tokens=9, ignore_eos=True)).status_code == 200
        lost, kept = Stream(clients[victim]), Stream(clients[other])
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            lost.rest()
        with client(server) as http:
            until(lambda: metric(http, "nf4_num_requests_running") == 1)
            assert metric(http, "nf4_generation_tokens_total") >= tokens + 27
            assert metric(http, "nf4_http_requests_in_flight") == 2
            for _ in range(200):
                assert next(kept.lines).startswith("data: ")
            kept.close()
            # As much as ever fits, so that nothing is held for the dead.
            until(lambda: metric(http, "nf4_num_requests_running") == 0)
            until(lambda: metric(http, "nf4_api_processes") == 3)
            until(lambda: len(processes(server)) == 3)
        with one_each(server) as one, one_each(server, KEYS[1]) as two:
            streams = [Stream(http) for http in (*one.values(), *two.values())]
            assert [stream.status for stream in streams] == [200] * LIMIT
            for stream in streams:
                stream.close()


def test_an_engine_that_is_killed(server: RunningServer) -> None:
    """Streams of all processes end with an error, and all take requests again."""
    with one_each(server) as clients:
        streams = [Stream(http) for http in clients.values()]
        os.kill(engine_pid(server.process.pid), signal.SIGKILL)
        for stream in streams:
            error = json.loads(stream.rest()[-1].removeprefix("data: "))["error"]
            assert error["code"] == "engine_error"
        for http in clients.values():
            until(lambda http=http: http.get("/health").status_code == 200)
            assert http.get("/health").json()["engine_restarts"] == 1
            assert http.post(CHAT, json=chat_body()).status_code == 200


def test_the_end(embedded_folder: Path, tmp_path: Path) -> None:
    """SIGTERM lets all processes answer what they have begun, and takes nothing new."""
    config = write_random_model(tmp_path / "model", embedded_folder, {"api_processes": 3})
    with start_server(tmp_path / "log", config=config) as server, one_each(server) as clients:
        streams = [Stream(http, max_tokens=100, messages=user("Go on.")) for http in clients.values()]
        pids = processes(server)
        server.process.send_signal(signal.SIGTERM)
        ends = [stream.rest()[-1] for stream in streams]
        assert ends == ["data: [DONE]"] * 3
        for http in clients.values():
            http.close()
        assert server.process.wait(60) == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert "Traceback" not in server.log.read_text()


def test_what_one_process_keeps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"http: .*response_store keeps answers in one process"):
        load_config(None, {"http.api_processes": 2, "http.response_store": 10})
    with pytest.raises(ConfigError, match=r"http\.api_processes"):
        load_config(None, {"http.api_processes": 0})
