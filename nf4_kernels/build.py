"""Compile the kernel libraries: python -m nf4_kernels.build [--force] [--cpu-only] [--native].

Two shared libraries with a plain C interface come out, in nf4_kernels/lib/ (library_files.py): libnf4_cpu.so (g++, always)
and libnf4_cuda.so (nvcc, where one is found). No torch header is included, so one build serves every torch version. The
ending of a C++ source's name says its instruction set: *_avx2.cpp, *_avx512.cpp, *_amx.cpp; the choice among them is made
at run time. A CUDA source is compiled for all GPU targets; where its name or a folder's ends in _sm90, for 90a alone.
NF4_CUDA_ARCHS chooses the targets (default "80;86;89;90a;100;120").
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "csrc"
LIBRARIES = ROOT / "lib"
IS_CHECKOUT = (ROOT / "pyproject.toml").exists()
"""Whether this is the package's source tree; an installed package has no pyproject.toml."""
CUDA_ARCHS = "80;86;89;90a;100;120"
SYSTEM_NVCC = "/usr/local/cuda/bin/nvcc"

_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vbmi", "-mfma", "-mf16c"]
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": _AVX512,
    "avx512vnni": [*_AVX512, "-mavx512vnni"],
    "amx": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}


class BuildError(RuntimeError):
    """A compiler was missing or failed; the message holds the command and what it printed."""


def find_nvcc() -> str | None:
    """Path of nvcc from $CUDA_HOME, PATH, /usr/local/cuda or NVIDIA's PyPI wheels; None where there is none."""
    candidates = []
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(os.path.join(home, "bin", "nvcc"))
    if on_path := shutil.which("nvcc"):
        candidates.append(on_path)
    candidates.append(SYSTEM_NVCC)
    for entry in sys.path:
        candidates.extend(str(p) for p in Path(entry or ".").glob("nvidia/*/bin/nvcc"))
    return next((c for c in candidates if os.access(c, os.X_OK)), None)


def installed_gpu_archs() -> str:
    """Targets of the GPUs in this machine, for NF4_CUDA_ARCHS ("90a"); empty where nvidia-smi finds none."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode:
        return ""
    found = {line.strip().replace(".", "") for line in done.stdout.splitlines() if line.strip()}
    return ";".join(sorted("90a" if arch == "90" else arch for arch in found))


def build_cpu(force: bool = False, folder: Path | None = None, quiet: bool = False) -> Path:
    """Compile csrc/cpu/*.cpp into folder/libnf4_cpu.so (None: lib/); returns its path. Raises BuildError.

    quiet: do not print which files have been compiled.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BuildError(f"no C++ compiler: {compiler!r} is not on PATH (Debian: apt-get install g++)")
    sources = sorted((SOURCES / "cpu").glob("*.cpp"))
    base = [
        compiler,
        "-std=c++17",
        "-O3",
        "-fPIC",
        "-fopenmp",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-DNF4_CPU",
        "-ffp-contract=off",  # dequantizing must round as bitsandbytes does; kernels name their FMAs
        "-Wall",
        "-Wextra",
    ]
    jobs = []
    for source in sources:
        isa = source.stem.rpartition("_")[2]
        jobs.append((source, [*base, *ISA_FLAGS.get(isa, []), "-I", str(SOURCES), "-c", str(source)]))
    return _link("libnf4_cpu.so", jobs, [compiler, "-shared", "-fopenmp"], folder, force, quiet)


def build_cuda(
    nvcc: str, force: bool = False, folder: Path | None = None, quiet: bool = False, archs: str | None = None
) -> Path:
    """Compile csrc/cuda/**/*.cu into folder/libnf4_cuda.so, with the CUDA runtime linked in; as build_cpu().

    archs: GPU targets ("80;90a"); None means NF4_CUDA_ARCHS, or CUDA_ARCHS where that is not set.
    """
    sources = sorted((SOURCES / "cuda").rglob("*.cu"))
    targets_of_all = [a for a in (archs or os.environ.get("NF4_CUDA_ARCHS", CUDA_ARCHS)).split(";") if a]
    jobs = []
    for source in sources:
        targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in cuda_archs(source, targets_of_all)]
        command = [nvcc, "-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-I", str(SOURCES), *targets]
        jobs.append((source, [*command, "-c", str(source)]))
    # NVIDIA's wheels keep their libraries in lib, where their nvcc does not look (it looks in lib64).
    wheel = Path(nvcc).resolve().parent.parent / "lib"
    search = [f"-L{wheel}"] if (wheel / "libcudart_static.a").exists() else []
    return _link("libnf4_cuda.so", jobs, [nvcc, "-shared", "-cudart", "static", *search], folder, force, quiet)


def cuda_archs(source: Path, archs: list[str]) -> list[str]:
    """The targets among archs that a CUDA source is compiled for.

    A source whose own or whose folder's name ends in _sm90 is compiled for 90a. If archs lack 90a, it is compiled for
    all of them: its kernels are then empty, but the C functions around them are there.
    """
    parts = source.relative_to(SOURCES).with_suffix("").parts
    return ["90a"] if "90a" in archs and any(part.endswith("_sm90") for part in parts) else archs


def _link(
    name: str, jobs: list[tuple[Path, list[str]]], link: list[str], folder: Path | None, force: bool, quiet: bool
) -> Path:
    folder = folder or LIBRARIES
    output = folder / name
    stamp = output.with_suffix(".stamp")
    digest = _digest([command for _, command in jobs])
    objects = folder / (output.stem + ".objects")
    folder.mkdir(parents=True, exist_ok=True)
    # Another process that builds at the same time waits here, and then finds the library.
    with output.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not force and output.exists() and stamp.exists() and stamp.read_text() == digest:
            return output
        shutil.rmtree(objects, ignore_errors=True)
        objects.mkdir()
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            compiled = list(pool.map(partial(_compile, objects, quiet), jobs))
        unfinished = output.with_suffix(".partial")
        _run([*link, *compiled, "-o", str(unfinished)])
        unfinished.replace(output)
        stamp.write_text(digest)
        shutil.rmtree(objects)
    return output


def _compile(objects: Path, quiet: bool, job: tuple[Path, list[str]]) -> str:
    source, command = job
    name = source.relative_to(SOURCES)
    target = str(objects / ("-".join(name.with_suffix("").parts) + ".o"))
    _run([*command, "-o", target])
    if not quiet:
        print(f"nf4_kernels: compiled {name}", flush=True)
    return target


@functools.cache
def sources_digest() -> str:
    """A short name for the sources and for how they are compiled; two versions of the package differ in it."""
    return _digest([[Path(__file__).read_text(), platform.machine()]])[:16]


def _digest(commands: list[list[str]]) -> str:
    digest = hashlib.sha256(repr(commands).encode())
    for path in sorted(SOURCES.rglob("*")):
        if path.is_file():
            # The name counts, too, because sources include headers by name.
            digest.update(f"{path.relative_to(SOURCES)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}".rstrip())
    if done.stderr.strip():
        print(done.stderr.rstrip(), file=sys.stderr)


def main() -> int:
    """Build what can be built here; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m nf4_kernels.build", description="Compile the NF4 kernel libraries."
    )
    parser.add_argument("--force", action="store_true", help="compile again even if nothing changed")
    parser.add_argument("--cpu-only", action="store_true", help="leave the CUDA library out even if nvcc is found")
    parser.add_argument(
        "--native", action="store_true", help="compile CUDA only for this machine's GPUs, if it has any"
    )
    options = parser.parse_args()
    if options.native and "NF4_CUDA_ARCHS" not in os.environ:
        os.environ["NF4_CUDA_ARCHS"] = installed_gpu_archs()
    from nf4_kernels.library_files import install_folder

    folder = install_folder()
    try:
        print(f"nf4_kernels: {build_cpu(options.force, folder)}")
        nvcc = find_nvcc()
        if options.cpu_only:
            print("nf4_kernels: CUDA library left out (--cpu-only)")
        elif not os.environ.get("NF4_CUDA_ARCHS", CUDA_ARCHS):
            print("nf4_kernels: CUDA library left out: no NVIDIA GPU in this machine")
        elif nvcc is None:
            print(
                "nf4_kernels: CUDA library left out: no nvcc found (PATH, CUDA_HOME, /usr/local/cuda, NVIDIA's wheels)"
            )
        else:
            print(f"nf4_kernels: {build_cuda(nvcc, options.force, folder)}")
    except BuildError as e:
        print(f"nf4_kernels: build failed: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
