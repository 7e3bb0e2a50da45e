"""The kernels as a distribution of their own: the wheel's files, and its first use, outside of the source tree."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest

import nf4_kernels
from deploy.wheels import platform_tag, with_libraries
from nf4_kernels import build, library_files

SOURCE = Path(nf4_kernels.__file__).parent
FIRST_USE = """
import torch, nf4_kernels
from nf4_kernels import reference
print(nf4_kernels.__file__)
print(nf4_kernels.__version__)
print(nf4_kernels.capabilities()["cpu"])
weight = nf4_kernels.Weight(torch.randint(0, 256, (48 * 64,), dtype=torch.uint8), (48, 128), torch.rand(96), 64)
x = torch.randn(3, 128)
exact = reference.linear(x, weight)
assert (nf4_kernels.linear_4bit(x, weight.packed, weight) - exact).norm() < 3e-4 * exact.norm()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("lib", "build", "__pycache__", "*.egg-info")
    shutil.copytree(SOURCE, folder / "source", ignore=ignored)
    own = importlib.util.find_spec("setuptools") and int(version("setuptools").partition(".")[0]) >= 77
    isolation = ["--no-build-isolation"] if own else []
    run("-m", "pip", "wheel", "--no-deps", *isolation, "--wheel-dir", str(folder), str(folder / "source"), at=folder)
    (built,) = folder.glob("*.whl")
    return built


def run(*arguments: str, at: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=at, env=kept | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_wheel_has_all_modules_and_sources_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.check_output(["git", "ls-files"], cwd=SOURCE, text=True).splitlines()
    beside = {"LICENSE", "README.md", "pyproject.toml"}
    assert names == {f"nf4_kernels/{name}" for name in tracked if name not in beside}
    assert {"nf4_kernels/plan/wgmma.py", "nf4_kernels/csrc/params.h", "nf4_kernels/py.typed"} < names
    assert wheel.name == f"nf4_kernels-{nf4_kernels.__version__}-py3-none-any.whl"


def test_the_wheel_needs_torch_only(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(files.read(name).decode())
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [re.split("[<>]", line)[0] for line in needed] == ["torch"]


@pytest.mark.rest
def test_a_wheel_with_a_library_needs_no_compiler(wheel: Path, tmp_path: Path) -> None:
    library = build.LIBRARIES / "libnf4_cpu.so"
    whole = with_libraries(wheel, [library], tmp_path)
    assert whole.name == f"nf4_kernels-{nf4_kernels.__version__}-py3-none-{platform_tag([library])}.whl"
    assert "-manylinux_2_" in whole.name
    home = tmp_path / "home"
    home.mkdir()
    # pip checks the tag against this machine's glibc, and every file against RECORD when it is removed again.
    run("-m", "venv", "--without-pip", "venv", at=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run("-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(whole), at=tmp_path)
    (installed,) = tmp_path.glob("venv/lib/python*/site-packages")
    (found,) = installed.rglob("*.so")
    assert found.read_bytes() == library.read_bytes()
    environment = {
        "HOME": str(home),
        "PYTHONPATH": str(installed),
        "CXX": "no-such-compiler",
        "CUDA_VISIBLE_DEVICES": "",
    }
    used = run("-c", FIRST_USE, at=tmp_path, **environment)
    assert Path(used.stdout.splitlines()[0]) == installed / "nf4_kernels" / "__init__.py"
    assert "compil" not in used.stderr
    assert not list(home.rglob("*.so"))


VLLM = """
# As vLLM does it: plugins are called once in the parent, and a forked worker imports bitsandbytes when it makes its model.
import importlib.util, logging, os, sys
from importlib.metadata import entry_points
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
(plugin,) = entry_points(group="vllm.general_plugins", name="nf4_kernels")
plugin.load()()
plugin.load()()
assert importlib.util.find_spec("bitsandbytes") and "bitsandbytes" not in sys.modules
if worker := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
from bitsandbytes.nn import Linear4bit
import bitsandbytes
loader = bitsandbytes.__loader__
assert loader is bitsandbytes.__spec__.loader and "nf4_kernels" not in type(loader).__module__
print(Linear4bit.forward.__module__)
"""


@pytest.mark.rest
def test_vllm_finds_the_plugin_and_a_worker_runs_on_the_kernels(wheel: Path, tmp_path: Path) -> None:
    whole = with_libraries(wheel, [build.LIBRARIES / "libnf4_cpu.so"], tmp_path)
    installed = tmp_path / "installed"
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(installed), str(whole), at=tmp_path)
    environment = {"PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""}
    worker = run("-c", VLLM, at=tmp_path, **environment)
    assert worker.stdout == "nf4_kernels.bnb\n"
    assert worker.stderr.count("vllm.nf4_kernels: ") == 1
    assert f"nf4_kernels {nf4_kernels.__version__}" in worker.stderr
    off = run("-c", VLLM, at=tmp_path, NF4_KERNELS_VLLM="0", **environment)
    assert off.stdout == "bitsandbytes.nn.modules\n"
    # An error leaves vLLM as it is, and one line says which.
    (installed / "nf4_kernels" / "bnb.py").write_text("raise ImportError('no such thing')")
    broken = run("-c", VLLM, at=tmp_path, **environment)
    assert broken.stdout == "bitsandbytes.nn.modules\n"
    assert broken.stderr.count("vllm.nf4_kernels: ") == 1
    assert "no such thing" in broken.stderr


def test_libraries_that_need_newer_symbols_get_no_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def needing(*symbols: str) -> str:
        dump = "".join(f"0 DF *UND* 0 ({symbol}) name\n" for symbol in symbols)
        monkeypatch.setattr("subprocess.check_output", lambda *_, **__: dump)
        return platform_tag([tmp_path / "library.so"])

    machine = platform.machine()
    assert needing("GLIBC_2.2.5", "GLIBCXX_3.4.9") == f"manylinux_2_17_{machine}"
    assert needing("GLIBC_2.14", "CXXABI_1.3.9") == f"manylinux_2_28_{machine}"
    assert needing("GLIBC_2.35", "CXXABI_1.3.9") == f"manylinux_2_35_{machine}"
    with pytest.raises(ValueError, match="newer symbols"):
        needing("GLIBCXX_3.4.99")


def test_what_to_do_is_said_where_nothing_can_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setattr(build, "IS_CHECKOUT", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = library_files.cpu_library()
    assert found == (
        "libnf4_cpu.so could not be compiled: no C++ compiler: 'no-such-compiler' is not on PATH"
        " (Debian: apt-get install g++)"
    )
    monkeypatch.delenv("CXX")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = library_files.cpu_library()
    assert isinstance(found, str)
    assert "set XDG_CACHE_HOME to a folder that can be written to" in found


def test_no_cuda_library_is_compiled_without_a_gpu_or_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "sees no CUDA GPU" in str(library_files.cuda_library())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert "pip install 'nf4-kernels[build-cuda]'" in str(library_files.cuda_library())


@pytest.mark.parametrize("checkout", [True, False])
def test_libraries_go_where_the_package_may_be_written(
    checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "IS_CHECKOUT", checkout)
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = build.sources_digest()
    assert library_files.install_folder() == (tmp_path / "lib" if checkout else tmp_path / "lib" / digest)
    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "file" / "lib")
    assert library_files.install_folder() == tmp_path / "cache" / "nf4-kernels" / digest
    # What lies in the package counts first.
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    cached = tmp_path / "cache" / "nf4-kernels" / digest / "libnf4_cpu.so"
    own = library_files.install_folder() / "libnf4_cpu.so"
    for path in (cached, own):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert library_files.cpu_library() == path


def test_code_that_others_can_have_written_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "libnf4_cpu.so"
    path.touch(0o644)
    assert library_files.untrusted(path) is None
    monkeypatch.setattr(os, "getgroups", list)
    monkeypatch.setattr(os, "getegid", lambda: path.stat().st_gid)
    path.chmod(0o664)
    assert library_files.untrusted(path) is None  # this process's own group
    monkeypatch.setattr(os, "getegid", lambda: path.stat().st_gid + 1)
    assert "group" in str(library_files.untrusted(path))
    for file, folder, allowed in ((0o646, 0o755, False), (0o644, 0o777, False), (0o644, 0o1777, True)):
        path.chmod(file)
        tmp_path.chmod(folder)
        assert (library_files.untrusted(path) is None) == allowed
    user = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert (f"belongs to user {user}" in str(library_files.untrusted(path))) == (user != 0)


def test_a_cached_library_of_others_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "IS_CHECKOUT", False)
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "build_cpu", lambda folder, report: folder / "made anew")
    cached = tmp_path / "cache" / "nf4-kernels" / build.sources_digest() / "libnf4_cpu.so"
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert library_files.cpu_library() == cached
    cached.chmod(0o666)
    assert library_files.cpu_library() == cached.parent / "made anew"
