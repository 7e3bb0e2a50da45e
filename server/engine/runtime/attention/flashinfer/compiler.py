"""The tools that FlashInfer compiles its attention with: nvcc and its toolkit, the C++ compiler, ninja."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from nf4_kernels.build import find_nvcc


def prepare_compiler(cache: Path) -> None:
    """Set what FlashInfer reads from this process's environment: PATH and, for an nvcc from NVIDIA's wheels, CUDA_HOME.

    cache: where the wheels' toolkit() is kept. It must be the same at every start, because FlashInfer compiles anew when
    CUDA_HOME changes. Raises OSError or subprocess.CalledProcessError when it cannot be made there.
    """
    if shutil.which("ninja") is None:
        # pip's ninja lies beside this Python, which is not on PATH when the virtual environment is not activated.
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    nvcc = find_nvcc()
    if nvcc is not None and (wheels := Path(nvcc).parents[1]).parent.name == "nvidia":
        os.environ["CUDA_HOME"] = str(toolkit(wheels, cache))


def missing_compiler() -> str | None:
    """Name a compiler that is missing, and the cure; None if all are there."""
    if find_nvcc() is None:
        return "there is no nvcc to compile FlashInfer's kernels (pip install 'nf4-server[build-cuda]')"
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler to compile FlashInfer's kernels: {compiler!r} (Debian: apt-get install g++)"
    if shutil.which("ninja") is None:
        return "there is no ninja to compile FlashInfer's kernels (pip install 'nf4-server[cuda]')"
    return None


def toolkit(wheels: Path, cache: Path) -> Path:
    """A folder below cache that looks like an installed CUDA toolkit, of links into NVIDIA's wheels; made once.

    wheels: their common folder, .../nvidia/cu13. It has no lib64, and its libraries have no names without a version.
    """
    home = cache / f"cuda-{hashlib.sha256(str(wheels).encode()).hexdigest()[:12]}"
    runtime = home / "lib64" / "libcudart.so"
    if runtime.exists():
        return home
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="cuda-") as folder:
        made = Path(folder) / "toolkit"
        stubs = made / "lib64" / "stubs"
        stubs.mkdir(parents=True)
        for name in ("bin", "include", "nvvm"):
            (made / name).symlink_to(wheels / name)
        for library in (wheels / "lib").iterdir():
            (made / "lib64" / library.name).symlink_to(library)
        newest = max((wheels / "lib").glob("libcudart.so.*"))
        (made / "lib64" / "libcudart.so").symlink_to(newest)
        # The driver's library comes with the GPU, often without the name that a linker looks for. So a library without
        # functions is linked in its place; it has the same soname.
        stub = ["-shared", "-Wl,-soname,libcuda.so.1", "-o", str(stubs / "libcuda.so"), "-x", "c++", "/dev/null"]
        subprocess.run([os.environ.get("CXX", "c++"), *stub], check=True, capture_output=True)
        # The links of an old folder lead nowhere, because the runtime that they point to is gone.
        shutil.rmtree(home, ignore_errors=True)
        try:
            made.rename(home)
        except OSError:
            # Another engine that starts was first.
            if not runtime.exists():
                raise
    return home
