"""Compile the kernel libraries: python -m nf4_kernels.build [--force] [--cpu-only] [--native] [--check-cuda].

Two shared libraries with a plain C interface come out, in nf4_kernels/lib/ (library_files.py): libnf4_cpu.so (g++, always)
and libnf4_cuda.so (nvcc, if one is found). No torch header is included, so one build serves every torch version. The
ending of a C++ source's name says its instruction set: *_avx2.cpp, *_avx512.cpp, *_amx.cpp; the choice among them is made
at run time. A CUDA source is compiled for all GPU targets; if its name or a folder's ends in _sm90, for 90a alone, if in
_sm80, for all others. NF4_CUDA_ARCHS chooses the targets (default "80;86;90a;100;120"). A source is compiled again only
if it, a header that it includes or its command has changed (object_files.py). With NF4_POSE_AS=86 and NF4_CUDA_ARCHS=90 the
kernels are those for capability 8.6, translated for an H100: with the same variable the server and the library then choose
as on such a GPU.

Run as a file, python nf4_kernels/build.py, it needs no torch, whose import takes seconds.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent
if not __package__:
    # Modules of the package are found without its __init__, which imports torch.
    package = ModuleType("nf4_kernels")
    package.__path__ = [str(ROOT)]
    sys.modules["nf4_kernels"] = package

from nf4_kernels.object_files import (  # noqa: E402
    BuildError,
    Compiler,
    Report,
    build_library,
    run,
    say,
    source_digests,
)

SOURCES = ROOT / "csrc"
LIBRARIES = ROOT / "lib"
IS_CHECKOUT = (ROOT / "pyproject.toml").exists()
"""Whether this is the package's source tree; an installed package has no pyproject.toml."""
CUDA_ARCHS = "80;86;90a;100;120"
"""Targets of a library for every GPU. Capabilities 8.7 and 8.9 run the code of 8.6, as they have as much shared memory."""
LEAST_ARCH = 80
"""Older GPUs have no asynchronous copies to shared memory."""
CHECKED_ARCH = "90a"
"""The target for which every kernel has a body."""
SYSTEM_NVCC = "/usr/local/cuda/bin/nvcc"
NO_NVCC = "no nvcc found (CUDA_HOME, NVIDIA's wheels, PATH, /usr/local/cuda)"

_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vbmi", "-mfma", "-mf16c"]
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": _AVX512,
    "avx512vnni": [*_AVX512, "-mavx512vnni"],
    "amx": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}


def find_nvcc() -> str | None:
    """Path of nvcc from $CUDA_HOME, NVIDIA's PyPI wheels, PATH or /usr/local/cuda; None if there is none.

    Wheels are installed where the system's nvcc is too old, as Debian's and Ubuntu's are.
    """
    candidates = []
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(os.path.join(home, "bin", "nvcc"))
    for entry in sys.path:
        candidates.extend(str(p) for p in Path(entry or ".").glob("nvidia/*/bin/nvcc"))
    if on_path := shutil.which("nvcc"):
        candidates.append(on_path)
    candidates.append(SYSTEM_NVCC)
    return next((c for c in candidates if os.access(c, os.X_OK)), None)


def installed_gpu_archs() -> str:
    """Targets of the GPUs in this machine, for NF4_CUDA_ARCHS ("90a"); empty if nvidia-smi finds none from 8.0 on."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode:
        return ""
    found = {
        int(line.replace(".", "")) for line in done.stdout.splitlines() if line.replace(".", "").strip().isdecimal()
    }
    return ";".join("90a" if arch == 90 else str(arch) for arch in sorted(found) if arch >= LEAST_ARCH)


def build_cpu(force: bool = False, folder: Path | None = None, report: Report = say) -> Path:
    """Compile csrc/cpu/*.cpp into folder/libnf4_cpu.so (None: lib/) if they have changed, and return its path.

    report: receives a line for each compiled source. Raises BuildError.
    """
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"no C++ compiler: {name!r} is not on PATH (Debian: apt-get install g++)")
    compiler = Compiler.of(
        found,
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
        "-I.",
    )
    commands = {}
    for source in sorted((SOURCES / "cpu").glob("*.cpp")):
        isa = source.stem.rpartition("_")[2]
        commands[source.relative_to(SOURCES).as_posix()] = ISA_FLAGS.get(isa, [])
    return _build("libnf4_cpu.so", compiler, commands, ["-shared", "-fopenmp"], force, folder, report)


def build_cuda(
    nvcc: str,
    force: bool = False,
    folder: Path | None = None,
    report: Report = say,
    archs: str | None = None,
    flags: list[str] | None = None,
) -> Path:
    """Compile csrc/cuda/**/*.cu into folder/libnf4_cuda.so, with the CUDA runtime linked in; as build_cpu().

    archs: GPU targets ("80;90a"); None means NF4_CUDA_ARCHS, or CUDA_ARCHS if that is not set. flags: more of nvcc's.
    """
    compiler = Compiler.of(nvcc, "-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-I.", *(flags or []))
    all_targets = [a for a in (archs or os.environ.get("NF4_CUDA_ARCHS", CUDA_ARCHS)).split(";") if a]
    posed = os.environ.get("NF4_POSE_AS")
    posing = [] if posed is None else ["-DNF4_POSED"]
    commands = {
        source.relative_to(SOURCES).as_posix(): [
            *posing,
            *(f"-gencode=arch=compute_{posed or a},code=sm_{a}" for a in cuda_archs(source, all_targets)),
        ]
        for source in sorted((SOURCES / "cuda").rglob("*.cu"))
    }
    # NVIDIA's wheels keep their libraries in lib, where their nvcc does not look (it looks in lib64).
    wheel = Path(nvcc).resolve().parent.parent / "lib"
    search = [f"-L{wheel}"] if (wheel / "libcudart_static.a").exists() else []
    link = ["-shared", "-cudart", "static", *search]
    return _build("libnf4_cuda.so", compiler, commands, link, force, folder, report)


def check_cuda(nvcc: str) -> Path:
    """Compile every CUDA source for CHECKED_ARCH, hardly optimized: errors are found in a third of the time.

    Objects are kept in lib/check, and no library there is ever loaded. Raises BuildError.
    """
    fast = ["--Ofast-compile=max"] if "--Ofast-compile" in run([nvcc, "--help"], ROOT) else []
    # What is not optimized is announced at length.
    return build_cuda(nvcc, False, LIBRARIES / "check", archs=CHECKED_ARCH, flags=[*fast, "-w", "-Xptxas", "-w"])


def cuda_archs(source: Path, archs: list[str]) -> list[str]:
    """The targets among archs that a CUDA source is compiled for.

    A source whose own or whose folder's name ends in _sm90 is compiled for 90a, in _sm80 for the others, which have no
    wgmma: plans have its kernels nowhere else. If archs have none of these, it is compiled for all of them: its kernels are
    then empty or unused, but the C functions around them are there.
    """
    parts = source.relative_to(SOURCES).with_suffix("").parts
    if any(part.endswith("_sm90") for part in parts):
        used = [arch for arch in archs if arch == "90a"]
    elif any(part.endswith("_sm80") for part in parts):
        used = [arch for arch in archs if arch != "90a"]
    else:
        used = archs
    return used or archs


def _build(
    name: str,
    compiler: Compiler,
    commands: dict[str, list[str]],
    link: list[str],
    force: bool,
    folder: Path | None,
    report: Report,
) -> Path:
    output = (folder or LIBRARIES) / name
    # An installed package is compiled once.
    return build_library(
        output, SOURCES, compiler, commands, link, force=force, keep_objects=IS_CHECKOUT, report=report
    )


@functools.cache
def sources_digest() -> str:
    """A short name for the sources and for how they are compiled; two versions of the package differ in it."""
    parts = [source_digests(SOURCES), Path(__file__).read_text(), platform.machine()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


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
    parser.add_argument(
        "--check-cuda", action="store_true", help="only compile every CUDA source for one GPU, to find errors"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at once and without a traceback; what is compiled is kept
    if options.native and "NF4_CUDA_ARCHS" not in os.environ:
        os.environ["NF4_CUDA_ARCHS"] = installed_gpu_archs()
    try:
        return _check() if options.check_cuda else _build_all(options.force, options.cpu_only)
    except BuildError as e:
        print(f"nf4_kernels: build failed: {e}", file=sys.stderr)
        return 1


def _check() -> int:
    nvcc = find_nvcc()
    if nvcc is None:
        print(f"nf4_kernels: CUDA sources not checked: {NO_NVCC}", file=sys.stderr)
        return 1
    check_cuda(nvcc)
    print("nf4_kernels: every CUDA source compiles")
    return 0


def _build_all(force: bool, cpu_only: bool) -> int:
    from nf4_kernels.library_files import install_folder

    folder = install_folder()
    print(f"nf4_kernels: {build_cpu(force, folder)}", flush=True)
    nvcc = find_nvcc()
    if cpu_only:
        print("nf4_kernels: CUDA library left out (--cpu-only)")
    elif not os.environ.get("NF4_CUDA_ARCHS", CUDA_ARCHS):
        print("nf4_kernels: CUDA library left out: nvidia-smi finds no GPU of capability 8.0 or newer")
    elif nvcc is None:
        print(f"nf4_kernels: CUDA library left out: {NO_NVCC}")
    else:
        print(f"nf4_kernels: {build_cuda(nvcc, force, folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
