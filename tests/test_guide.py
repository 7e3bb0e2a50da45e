"""The guide's files and commands work: docs/guide.md and the README's snippet, with a real nginx where there is one."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bench.processes import free_port
from server.checkpoint.inspection import inspect_checkpoint
from server.config import Config
from server.config.flags import dotted_names, flag, parse
from server.config.sources import load_config
from tests.api.conftest import metric
from tests.conftest import RunningServer
from tests.http_servers import Handler

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CHAT = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}

needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt install nginx)")


def blocks(language: str, text: str = GUIDE) -> list[str]:
    """The text of every fenced block of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every command of the guide that starts the server, without the variables before it."""
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    found = [line.partition("nf4-server ")[2] for line in lines if re.match(r"([A-Z_]+=\S+ )*nf4-server ", line)]
    return [command for command in found if command != "--version"]


def configured(command: str) -> Config:
    """Parse a command line as the server does; that of nf4-server fits without its own option."""
    path, values, sources = parse(shlex.split(re.sub(r"^fits | --gpu-memory \S+", "", command)))
    return load_config(path, values, sources)


@pytest.mark.parametrize("command", commands())
def test_the_server_takes_the_guides_commands(command: str) -> None:
    assert configured(command).model


@pytest.mark.parametrize("written", sorted(set(re.findall(r"`(--[a-z][^`]*)`", GUIDE)) - {"--config", "--gpu-memory"}))
def test_the_server_takes_the_guides_flags(written: str) -> None:
    name, _, value = written.partition(" ")
    if value:
        configured(written)
    assert name.replace("--no-", "--") in {flag(dotted.rpartition(".")[2]) for dotted in dotted_names()}


def test_the_example_for_8_gb_is_what_its_table_recommends() -> None:
    engine = configured(next(command for command in commands() if "--expanded-weights" in command)).engine
    assert (engine.kv_cache_dtype, engine.expanded_weights, engine.max_model_len) == ("int8", "off", 8192)


@contextmanager
def nginx(configuration: str, folder: Path) -> Iterator[None]:
    """A real nginx with a block of the guide."""
    assert NGINX is not None
    folder.mkdir()
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("proxy", "client_body", "fastcgi", "uwsgi", "scgi")
    )
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off;\nerror_log {folder}/error.log;\npid {folder}/pid;\n{'user root;' if os.geteuid() == 0 else ''}\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{paths}{configuration}\n}}\n"
    )
    with subprocess.Popen([NGINX, "-c", str(file), "-p", str(folder)], stderr=subprocess.PIPE, text=True) as process:
        try:
            time.sleep(0.5)
            assert process.poll() is None, process.stderr and process.stderr.read()
            yield
        finally:
            process.terminate()


def nginx_blocks() -> tuple[str, str]:
    """The configuration for a sub-path, and that for two replicas."""
    sub_path, replicas = blocks("nginx")
    return sub_path, replicas


@needs_nginx
def test_the_api_and_the_page_work_below_a_path_of_nginx(server: RunningServer, tmp_path: Path) -> None:
    port = free_port()
    configuration = nginx_blocks()[0].replace("listen 80;", f"listen 127.0.0.1:{port};")
    configuration = configuration.replace("http://127.0.0.1:8000/", f"{server.base_url}/")
    url = f"http://127.0.0.1:{port}/llm"
    with nginx(configuration, tmp_path / "nginx"):
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "smollm2-135m-instruct"
        page = httpx.get(f"{url}/")
        assert page.status_code == 200
        for name in re.findall(r'(?:src|href)="(static/[^"]+)"', page.text):
            assert httpx.get(f"{url}/{name}").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 403
        long = CHAT | {"stream": True, "max_tokens": 4000, "ignore_eos": True}
        with (
            httpx.Client(base_url=server.base_url) as direct,
            httpx.stream("POST", f"{url}/v1/chat/completions", json=long, timeout=60) as answer,
        ):
            assert answer.status_code == 200
            next(line for line in answer.iter_lines() if line.startswith("data: "))
            # Events come one by one: the answer is still being written.
            assert metric(direct, "nf4_num_requests_running") == 1


class _Replica(Handler):
    """Answers its name, or 503 while it loads."""

    protocol_version = "HTTP/1.1"

    def respond(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        body = json.dumps({"port": server.server_port}).encode()
        self.answer(503 if server.is_loading else 200, body)


@needs_nginx
def test_nginx_divides_requests_and_passes_over_a_replica_that_loads(tmp_path: Path) -> None:
    replicas = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Replica) for _ in range(2)]
    port, configuration = free_port(), nginx_blocks()[1]
    for replica, written in zip(replicas, (8001, 8002), strict=True):
        replica.is_loading = False  # type: ignore[attr-defined]
        configuration = configuration.replace(f"127.0.0.1:{written}", f"127.0.0.1:{replica.server_port}")
        threading.Thread(target=replica.serve_forever, daemon=True).start()

    def answered() -> set[int]:
        answers = [httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=CHAT) for _ in range(8)]
        assert {answer.status_code for answer in answers} == {200}
        return {answer.json()["port"] for answer in answers}

    with nginx(configuration.replace("listen 80;", f"listen 127.0.0.1:{port};"), tmp_path / "nginx"):
        assert answered() == {replica.server_port for replica in replicas}
        replicas[0].is_loading = True  # type: ignore[attr-defined]
        assert answered() == {replicas[1].server_port}
        replicas[0].shutdown()
        replicas[0].server_close()
        assert answered() == {replicas[1].server_port}
        assert httpx.get(f"http://127.0.0.1:{port}/metrics").status_code == 403
    replicas[1].shutdown()
    replicas[1].server_close()


def test_the_unit_is_one_for_systemd(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd is not installed")
    (unit,) = blocks("ini")
    # Its program and user exist on the machine that it is written for.
    unit = unit.replace("/opt/nf4-server/.venv/bin/nf4-server", sys.executable).replace("User=nf4\n", "")
    file = tmp_path / "nf4-server.service"
    file.write_text(unit)
    done = subprocess.run([verify, "verify", str(file)], capture_output=True, text=True, check=False)
    assert "nf4-server.service" not in done.stderr, done.stderr
    stop = int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0])
    assert stop > Config().http.drain_timeout_s


def test_prometheus_takes_the_guides_file(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    document = yaml.safe_load(text)
    (rules,) = document["rule_files"]
    assert (ROOT / rules.removeprefix("/opt/nf4-server/")).exists()
    promtool = shutil.which("promtool")
    if promtool is not None:
        file = tmp_path / "prometheus.yml"
        file.write_text(text.replace("/opt/nf4-server", str(ROOT)))
        subprocess.run([promtool, "check", "config", str(file)], check=True, capture_output=True)


def test_a_request_with_a_key_of_a_file_is_answered(server: RunningServer, tmp_path: Path) -> None:
    """The guide's own lines, but for the server, which runs already and takes any key."""
    block = next(block for block in blocks("sh") if "openssl" in block)
    lines = [line for line in block.splitlines() if not line.startswith("nf4-server")]
    script = "\n".join(lines).replace("http://127.0.0.1:8000", server.base_url)
    done = subprocess.run(["sh", "-ec", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["object"] == "list", done.stderr
    keys = tmp_path / "keys.txt"
    assert keys.stat().st_mode & 0o077 == 0
    assert len(configured(f"--api-keys-file {keys}").http.keys()) == 1


@pytest.mark.rest
def test_the_guides_snippet_stores_a_checkpoint_in_nf4(embedded_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes))
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "plain")
    (snippet,) = blocks("python")
    written = snippet.replace("Qwen/Qwen3-8B", str(tmp_path / "plain"))
    written = written.replace("/models/qwen3-8b-nf4", str(tmp_path / "nf4"))
    subprocess.run([sys.executable, "-c", written], check=True, capture_output=True)
    assert inspect_checkpoint(tmp_path / "nf4").quantization == "nf4"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "nf4")) == len(tokenizer)


@pytest.mark.rest
def test_the_readmes_snippet_generates_and_prints_its_speed(embedded_folder: Path) -> None:
    (snippet,) = [
        block for block in blocks("python", (ROOT / "README.md").read_text()) if "nf4_kernels.enable" in block
    ]
    written = re.sub(r"folder = .*", f"folder = {str(embedded_folder)!r}", snippet)
    assert written != snippet
    command = [sys.executable, "-c", written.replace("64", "8")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("The three largest cities of France are"), done.stderr
    assert float(re.findall(r"^([\d.]+) tokens per second$", done.stdout, re.MULTILINE)[0]) > 0
