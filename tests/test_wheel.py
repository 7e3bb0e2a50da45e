"""The wheels as users get them: built, installed in a new environment outside of the tree, and served from."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from email.parser import Parser
from pathlib import Path

import httpx
import pytest

import server
from bench.processes import free_port, is_ready

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[1]
MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both wheels, and the server's source distribution; made from a copy, as building leaves files behind."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    ignored = shutil.ignore_patterns("lib", "build", "__pycache__", "*.egg-info")
    for name in ("server", "nf4_server", "nf4_kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-c", "from setuptools import build_meta as b; b.build_sdist('..')", at=source)
    for folder_ in (source, source / "nf4_kernels"):
        run(sys.executable, "-c", f"from setuptools import build_meta as b; b.build_wheel({str(folder)!r})", at=folder_)
    shutil.rmtree(source)
    return folder


def run(*command: str | Path, at: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XDG_CACHE_HOME")}
    done = subprocess.run(command, cwd=at, env=kept | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def wheel_of(built: Path, name: str) -> Path:
    (path,) = built.glob(f"{name}-*.whl")
    return path


def metadata(wheel: Path) -> Message:
    files = zipfile.ZipFile(wheel)
    (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(files.read(name).decode())


def test_the_wheel_has_one_package_with_every_file_of_the_folder(built: Path) -> None:
    wheel = wheel_of(built, "nf4_server")
    assert wheel.name == f"nf4_server-{server.__version__}-py3-none-any.whl"
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.check_output(["git", "ls-files", "server"], cwd=ROOT, text=True).splitlines()
    beside = ("vendor/.gitattributes", "vendor/pins.json")  # for who updates the page's libraries
    assert names == {name.replace("server/", "nf4_server/", 1) for name in tracked if not name.endswith(beside)}


def test_nothing_in_the_wheel_names_the_folder(built: Path) -> None:
    wheel = zipfile.ZipFile(wheel_of(built, "nf4_server"))
    rooms = "|".join(path.stem for path in (ROOT / "server").iterdir())
    left = re.compile(rf"^\s*(?:from|import) server\b|[\"']server\.(?:{rooms})\b|-m server\b", re.MULTILINE)
    for name in wheel.namelist():
        if name.endswith(".py"):
            code = wheel.read(name).decode()
            assert not left.search(code), name
            # "import server.a" binds another name there, and "server.a" would be undefined.
            nodes = list(ast.walk(ast.parse(code)))
            bound = {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
            bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
            bound |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
            assert "server" in bound or not any(isinstance(node, ast.Name) and node.id == "server" for node in nodes), (
                name
            )


def test_the_metadata_says_what_an_index_shows(built: Path) -> None:
    for name in ("nf4_server", "nf4_kernels"):
        found = metadata(wheel_of(built, name))
        assert found["Description-Content-Type"] == "text/markdown"
        assert found["License-Expression"] == "Apache-2.0"
        assert "Programming Language :: Python :: 3.13" in found.get_all("Classifier", [])
    needed = metadata(wheel_of(built, "nf4_server")).get_all("Requires-Dist", [])
    kernels = metadata(wheel_of(built, "nf4_kernels"))
    assert needed[0] == f"nf4-kernels=={kernels['Version']}"


def test_the_source_distribution_has_what_the_wheel_is_built_from(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("nf4_server-*.tar.gz")
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    run(sys.executable, "-c", "from setuptools import build_meta as b; b.build_wheel('.')", at=source)
    again, first = (set(zipfile.ZipFile(wheel_of(at, "nf4_server")).namelist()) for at in (source, built))
    assert again == first


def test_twine_has_nothing_to_say(built: Path) -> None:
    if importlib.util.find_spec("twine") is None:
        pytest.skip("twine is not installed: make test-wheel does it")
    files = [str(path) for path in built.iterdir()]
    done = run(sys.executable, "-m", "twine", "check", "--strict", *files, at=built)
    assert done.stdout.count("PASSED") == len(files) == 3


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin/ of a new environment with both wheels; what they need comes from this one, without the tree."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    wheels = [str(wheel_of(built, name)) for name in ("nf4_kernels", "nf4_server")]
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", *wheels, at=folder)
    # A folder named in a .pth file is searched last, and its own .pth files, which lead to the tree, are not read.
    others = {str(Path(place).parents[0]) for place in map(_origin, ("torch", "fastapi"))}
    (packages / "others.pth").write_text("\n".join(sorted(others)))
    return folder / "bin"


def _origin(package: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of a user's own, with packages that have the names of our folders."""
    for name in ("server", "bench"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not this one')")
    return tmp_path


def test_the_command_and_the_module_say_their_name_and_version(installed: Path, elsewhere: Path) -> None:
    for command in ([installed / "nf4-server"], [installed / "python", "-m", "nf4_server"]):
        assert run(*command, "--version", at=elsewhere).stdout == f"nf4-server {server.__version__}\n"
        assert run(*command, "--help", at=elsewhere).stdout.startswith("usage: nf4-server ")
    script = "import nf4_server, nf4_kernels; print(nf4_server.__file__, nf4_kernels.__file__)"
    for place in run(installed / "python", "-c", script, at=elsewhere).stdout.split():
        assert Path(place).is_relative_to(installed.parent)


@contextmanager
def serving(bin_folder: Path, at: Path, *arguments: str, **environment: str) -> Iterator[str]:
    port = free_port()
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XDG_CACHE_HOME")}
    command = [bin_folder / "nf4-server", "--port", str(port), *arguments]
    with (at / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=at, env=kept | environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 600
        while not is_ready(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, (at / "log").read_text()
            assert time.monotonic() < deadline, (at / "log").read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_installed_server_compiles_its_kernels_and_answers(
    installed: Path, elsewhere: Path, embedded_folder: Path
) -> None:
    """With an empty cache: the kernels are compiled for this machine, and the log says so."""
    home = elsewhere / "home"
    model = ["--model", str(embedded_folder), "--served-model-name", MODEL]
    with serving(installed, elsewhere, *model, HOME=str(home), NF4_LOG_LEVEL="info") as url:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "max_tokens": 12, "temperature": 0}  # fmt: skip
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert httpx.get(f"{url}/version").json() == {"version": server.__version__}
        assert "<title>" in httpx.get(url).text
    log = (elsewhere / "log").read_text()
    (library,) = home.rglob("libnf4_cpu.so")
    assert library.parents[1] == home / ".cache" / "nf4-kernels"
    assert f"compiling libnf4_cpu.so for this machine, once, into {library.parent}" in log
    assert "Traceback" not in log
