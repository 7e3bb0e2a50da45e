"""Wheels of nf4-kernels with compiled libraries inside: python -m deploy.wheels [--cuda] FOLDER.

The CPU library is compiled for all instruction sets, among which it chooses when it is loaded; with --cuda the CUDA library
for all GPU targets (NF4_CUDA_ARCHS) comes with it. Such a wheel needs no compiler where it is installed. Its tag names the
oldest glibc that the libraries run with (PEP 600). libgomp.so.1 is not in it: torch, which is always loaded first, has it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from nf4_kernels import build

SOURCE = Path(build.__file__).parent
POLICIES = {17: ((3, 4, 19), (1, 3, 7)), 28: ((3, 4, 24), (1, 3, 11)), 34: ((3, 4, 29), (1, 3, 13))}
"""By glibc's minor version, the newest GLIBCXX and CXXABI symbols that manylinux tags of that version promise."""


def pure_wheel(folder: Path) -> Path:
    """The wheel without libraries, built from a copy of the sources, as building leaves files behind."""
    with tempfile.TemporaryDirectory() as work:
        copy = Path(work) / "source"
        shutil.copytree(
            SOURCE, copy, ignore=shutil.ignore_patterns("lib", "build", "dist", "__pycache__", "*.egg-info")
        )
        code = f"from setuptools import build_meta as b; print(b.build_wheel({str(folder.absolute())!r}))"
        done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=True)
    return folder / done.stdout.splitlines()[-1]


def platform_tag(libraries: Sequence[Path]) -> str:
    """The manylinux tag of a wheel with these libraries, by the versions of the symbols that they need (objdump).

    Raises ValueError where no tag of POLICIES promises them.
    """
    dump = "".join(subprocess.check_output(["objdump", "-T", path], text=True) for path in libraries)
    newest: dict[str, tuple[int, ...]] = {"GLIBC": (2, 17), "GLIBCXX": (0,), "CXXABI": (0,)}
    for name, numbers in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)", dump):
        newest[name] = max(newest[name], tuple(map(int, numbers.split("."))))
    for minor, (libstdcxx, abi) in POLICIES.items():
        if newest["GLIBCXX"] <= libstdcxx and newest["CXXABI"] <= abi:
            return f"manylinux_2_{max(minor, newest['GLIBC'][1])}_{platform.machine()}"
    raise ValueError(f"the libraries need newer symbols than manylinux tags promise: {newest}; use an older g++")


def with_libraries(wheel: Path, libraries: Sequence[Path], folder: Path) -> Path:
    """A copy of a pure wheel in folder that has the libraries, too, where nf4_kernels looks for its own."""
    tag = f"py3-none-{platform_tag(libraries)}"
    target = folder / wheel.name.replace("py3-none-any", tag)
    record = []
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:

        def put(name: str, data: bytes) -> None:
            new.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")

        for library in libraries:
            put(f"nf4_kernels/lib/{build.sources_digest()}/{library.name}", library.read_bytes())
        (info,) = {name.partition("/")[0] for name in old.namelist() if ".dist-info/" in name}
        for name in old.namelist():
            data = old.read(name)
            if name == f"{info}/WHEEL":
                data = data.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
                data = data.replace(b"Tag: py3-none-any", f"Tag: {tag}".encode())
            if name != f"{info}/RECORD":
                put(name, data)
        new.writestr(f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]))
    return target


def main() -> int:
    """Build the wheel and print its path; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m deploy.wheels", description=__doc__)
    parser.add_argument("--cuda", action="store_true", help="with the CUDA library, for all GPU targets; needs nvcc")
    parser.add_argument("folder", type=Path, help="where the wheel goes")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    nvcc = build.find_nvcc() if options.cuda else None
    if options.cuda and nvcc is None:
        print("no nvcc found (PATH, CUDA_HOME, /usr/local/cuda, NVIDIA's wheels)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as work:
        try:
            libraries = [build.build_cpu(folder=Path(work) / "lib")]
            if nvcc is not None:
                libraries.append(build.build_cuda(nvcc, folder=Path(work) / "lib"))
            print(with_libraries(pure_wheel(Path(work)), libraries, options.folder))
        except (build.BuildError, ValueError) as e:
            print(e, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
