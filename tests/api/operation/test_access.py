"""Keys, origins, TLS, limits: on an application without a model, and what the command line says of bad settings."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.processes import free_port
from server.api.http.access import AccessLayer
from server.api.http.counts import FIRST_KEY
from server.app import create_app
from server.config import Config, ConfigError, HttpConfig
from server.config.sources import load_config


@asynccontextmanager
async def client(**http: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application whose model is never started."""
    app = create_app(Config(http=HttpConfig(**http)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as made:
        yield made


async def test_every_path_but_the_open_ones_needs_a_key() -> None:
    async with client(api_keys=("first", "second-key")) as http:
        for path in ("/v1/models", "/v1/nowhere", "/tokenize"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": ""}, {"Authorization": "Basic first"}):
                answer = await http.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["x-request-id"]
        for headers in ({"Authorization": "Bearer first"}, {"authorization": "bearer second-key"},
                        {"x-api-key": "first"}, {"api-key": "first"}, {"Authorization": "first"},
                        {"Authorization": "Bearer another-server's", "x-api-key": "first"},
                        {"x-api-key": "another-server's", "Authorization": "Bearer first"}):  # fmt: skip
            assert (await http.get("/v1/models", headers=headers)).status_code == 200
        for path in ("/", "/docs", "/openapi.json", "/version", "/metrics"):
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/ping")).status_code == 503


async def test_origins() -> None:
    async with client(cors_origins=("https://a.example",), api_keys=("k",)) as http:
        asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
        answer = await http.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        refused = await http.options("/v1/chat/completions", headers=asked | {"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in refused.headers
        # A page can read why it was refused.
        denied = await http.get("/v1/models", headers={"Origin": "https://a.example"})
        assert denied.status_code == 401
        assert denied.headers["access-control-allow-origin"] == "https://a.example"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - requests tell nobody how far they are
            await asyncio.sleep(0)


async def test_requests_under_way_are_counted_for_each_key() -> None:
    gate = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    layer = AccessLayer(slow, ("a", "b"), 2)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(layer), base_url="http://x") as http:
        held = [asyncio.create_task(http.get("/v1/x", headers={"x-api-key": "a"})) for _ in range(2)]
        await until(lambda: layer._counts.total(FIRST_KEY) == 2)
        refused = await http.get("/v1/x", headers={"x-api-key": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit")
        other = asyncio.create_task(http.get("/v1/x", headers={"x-api-key": "b"}))
        await until(lambda: layer._counts.total(FIRST_KEY + 1) == 1)
        gate.set()
        assert [(await task).status_code for task in (*held, other)] == [200, 200, 200]
        assert (await http.get("/v1/x", headers={"x-api-key": "a"})).status_code == 200


async def test_a_place_is_free_when_the_answer_has_been_read() -> None:
    ended = asyncio.Event()
    sent: list[Any] = []

    async def tidies_up_slowly(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        assert layer._counts.total(FIRST_KEY) == 1
        await send({"type": "http.response.body", "body": b""})
        await ended.wait()

    async def send(message: Any) -> None:
        sent.append((message["type"], layer._counts.total(FIRST_KEY)))

    layer = AccessLayer(tidies_up_slowly, ("a",), 1)
    scope = {"type": "http", "path": "/v1/x", "method": "POST", "headers": [(b"x-api-key", b"a")]}
    first = asyncio.create_task(layer(scope, None, send))  # type: ignore[arg-type]
    await until(lambda: len(sent) >= 3)
    assert [under_way for _, under_way in sent] == [1, 1, 0]
    second = asyncio.create_task(layer(scope, None, send))  # type: ignore[arg-type]
    ended.set()
    await asyncio.gather(first, second)
    assert len(sent) == 6
    assert layer._counts.total(FIRST_KEY) == 0


def test_keys_from_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nk1\n\n  k2  \n")
    monkeypatch.setenv("NF4_HTTP__API_KEYS", "e1, e2")
    assert load_config(None, {"http.api_keys_file": str(file)}).http.keys() == ("e1", "e2", "k1", "k2")
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="no key"):
        HttpConfig(api_keys_file=file).keys()
    with pytest.raises(ConfigError, match="api_keys_file"):
        HttpConfig(api_keys_file=tmp_path / "none").keys()


@pytest.mark.rest
def test_tls(tmp_path: Path) -> None:
    certificate, key, port = tmp_path / "cert.pem", tmp_path / "key.pem", free_port()
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate,
            "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]  # fmt: skip
    subprocess.run(made, check=True, capture_output=True)
    files = {"NF4_HTTP__TLS_CERT_FILE": str(certificate), "NF4_HTTP__TLS_KEY_FILE": str(key)}
    command = [sys.executable, "-m", "server", "--port", str(port)]
    environment = {**os.environ, **files, "NF4_HTTP__API_KEYS": "secret"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        trust = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trust, trust_env=False) as https:
            deadline = time.monotonic() + 120
            while True:
                try:
                    assert https.get("/v1/models").status_code == 401
                    break
                except httpx.ConnectError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            headers = {"Authorization": "Bearer secret", "X-Request-ID": "mine"}
            answer = https.get("/v1/models", headers=headers)
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/version", trust_env=False)
    finally:
        process.terminate()
        assert process.wait(60) == 0
