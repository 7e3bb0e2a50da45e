"""Files that the containers are made from."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import nf4_kernels
from bench.processes import free_port
from tests.http_servers import Handler, answering

ROOT = Path(__file__).parents[1]


def test_hadolint_has_nothing_to_say() -> None:
    command = [str(Path(sys.executable).parent / "hadolint"), "Dockerfile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == ""


def test_what_is_copied_is_in_the_context() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY") and "--from" not in line:
            copied |= {word for word in line.split()[1:-1] if not word.startswith("--")}
    assert copied == kept
    assert all((ROOT / name).exists() for name in kept)


def test_requirements_are_those_of_pyproject() -> None:
    server, kernels = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in (".", "nf4_kernels")
    )
    nvcc = kernels["optional-dependencies"]["build-cuda"]
    assert server["optional-dependencies"]["build-cuda"] == ["nf4-kernels[build-cuda]"]
    assert server["dependencies"][0] == f"nf4-kernels=={nf4_kernels.__version__}"
    # Asked for less than the server allows, the kernels would have pip fetch a newer torch and throw it away.
    (torch,) = kernels["dependencies"]
    assert torch in server["dependencies"]
    for extra, expected in (
        ([], server["dependencies"][1:]),
        (["build-cuda"], nvcc),
        (["cuda", "build-cuda"], server["optional-dependencies"]["cuda"] + nvcc),
    ):
        command = [sys.executable, "docker/requirements.py", *extra]
        assert subprocess.check_output(command, cwd=ROOT, text=True).splitlines() == expected


def test_compose_mounts_what_there_is() -> None:
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    mounts = [volume for service in services.values() for volume in service["volumes"] if volume.startswith("./")]
    assert len(mounts) == 4
    for mount in mounts:
        assert (ROOT / "docker" / mount.split(":")[0]).exists(), mount


def test_examples_publish_on_this_machine_only() -> None:
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    published = [port for service in services.values() for port in service.get("ports", [])]
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Dockerfile", "docs/operations.md")]
    published += [port for text in texts for port in re.findall(r"docker run[^`]*? -p (\S+)", text)]
    assert len(published) > 4
    assert all(port.startswith("127.0.0.1:") for port in published), published


def test_open_webui_is_offered_and_asks_the_server() -> None:
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    services = compose["services"]
    # Without its profile nothing of it is started.
    assert [name for name, service in services.items() if "profiles" in service] == ["open-webui"]
    webui = services["open-webui"]
    assert webui["profiles"] == ["webui"]
    port = services["server"]["ports"][0].split(":")[-1]
    assert webui["environment"]["OPENAI_API_BASE_URL"] == f"http://server:{port}/v1"
    # YAML's true would be no string, which compose refuses; an empty key would switch the connection off.
    assert all(isinstance(value, str) and value for value in webui["environment"].values())
    # Without log-in it must not be reachable from elsewhere.
    assert webui["environment"]["WEBUI_AUTH"] == "false"
    assert all(port.startswith("127.0.0.1:") for port in webui["ports"])
    # It waits for a server that answers, which the image's health check says.
    assert webui["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert "HEALTHCHECK" in (ROOT / "Dockerfile").read_text()
    assert ":" in webui["image"]
    assert not webui["image"].endswith((":main", ":latest"))
    # Every named volume is declared, and no two services want one port of the machine.
    named = {
        volume.split(":")[0]
        for service in services.values()
        for volume in service["volumes"]
        if not volume.startswith("./")
    }
    assert named == set(compose["volumes"])
    ports = [port.split(":")[-2] for service in services.values() for port in service["ports"]]
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_healthcheck(status: int, code: int, *, tls: bool, tmp_path: Path) -> None:
    class Health(Handler):
        def respond(self) -> None:
            self.answer(status if self.path == "/health" else 404)

    with answering(Health) as server:
        if tls:
            made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key", "-out", "certificate"]
            subprocess.run([*made, "-subj", "/CN=elsewhere"], cwd=tmp_path, check=True, capture_output=True)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
            server.handle_error = lambda *_: None  # type: ignore[method-assign,assignment] # the attempt without TLS
        environment = {"NF4_HTTP__PORT": str(server.server_port)}
        done = subprocess.run([sys.executable, "docker/healthcheck.py"], cwd=ROOT, env=environment, check=False)
    assert done.returncode == code


def test_healthcheck_without_a_server() -> None:
    environment = {"NF4_HTTP__PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "docker/healthcheck.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("unhealthy: ")
    assert done.stderr.count("\n") == 1
