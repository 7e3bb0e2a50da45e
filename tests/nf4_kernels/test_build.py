"""The build: where it looks for nvcc, what it compiles for which GPU, two builds at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nf4_kernels import build


def executable(path: Path) -> str:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_nvcc_of_nvidias_wheels_is_found_before_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "SYSTEM_NVCC", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    assert build.find_nvcc() is None
    system = executable(tmp_path / "bin" / "nvcc")
    monkeypatch.setattr(build, "SYSTEM_NVCC", system)
    assert build.find_nvcc() == system
    wheel = executable(tmp_path / "site-packages" / "nvidia" / "cu13" / "bin" / "nvcc")
    assert build.find_nvcc() == wheel
    toolkit = executable(tmp_path / "toolkit" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert build.find_nvcc() == toolkit


def test_an_nvcc_that_cannot_be_run_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "SYSTEM_NVCC", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "path", [])
    nvcc = executable(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.find_nvcc() == nvcc
    Path(nvcc).chmod(0o644)
    assert build.find_nvcc() is None


def test_a_build_waits_for_the_one_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Path(executable(tmp_path / "bin" / "c++"))
    # Writes its last argument; a second one at the same time would find the first one's mark.
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\n'
        f"mkdir {tmp_path}/mark || exit 1\nsleep 0.05\nfor last; do :; done\n"
        f'echo "$last" >> {tmp_path}/written\necho object > "$last"\nrmdir {tmp_path}/mark\n'
    )
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(2) as pool:
        built = [pool.submit(build.build_cpu) for _ in range(2)]
    assert [future.result() for future in built] == [tmp_path / "lib" / "libnf4_cpu.so"] * 2
    written = (tmp_path / "written").read_text().split()
    assert len(written) == len(set(written)) == len(list((build.SOURCES / "cpu").glob("*.cpp"))) + 1


def test_sources_of_a_room_are_compiled_for_the_gpus_whose_plans_have_its_kernels() -> None:
    archs = build.CUDA_ARCHS.split(";")
    targets = {
        str(source.relative_to(build.SOURCES / "cuda")): build.cuda_archs(source, archs)
        for source in (build.SOURCES / "cuda").rglob("*.cu")
    }
    assert targets["wgmma_sm90/linear_wgmma.cu"] == targets["wgmma_sm90/launches/up_to_32_timed.cu"] == ["90a"]
    assert targets["rows/linear_rows.cu"] == targets["dequantize.cu"] == archs
    assert targets["mma_sm80/linear_mma.cu"] == [arch for arch in archs if arch != "90a"]
    assert build.cuda_archs(build.SOURCES / "cuda" / "some_sm90.cu", archs) == ["90a"]
    # The C entries must be there for other GPUs' libraries, too.
    assert build.cuda_archs(build.SOURCES / "cuda" / "wgmma_sm90" / "linear_wgmma.cu", ["89"]) == ["89"]
    assert build.cuda_archs(build.SOURCES / "cuda" / "mma_sm80" / "linear_mma.cu", ["90a"]) == ["90a"]


def test_targets_are_those_of_the_gpus_that_have_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = Path(executable(tmp_path / "bin" / "nvidia-smi"))
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    for said, archs in (("8.9\n12.0\n8.9", "89;120"), ("7.5\n9.0", "90a"), ("7.5", ""), ("[N/A]", ""), ("", "")):
        smi.write_text(f"#!/bin/sh\nprintf '{said}\n'\n")
        assert build.installed_gpu_archs() == archs


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nvcc and without a GPU, whose nvcc writes down that it was called."""
    nvcc = Path(executable(tmp_path / "bin" / "nvcc"))
    nvcc.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build, "installed_gpu_archs", lambda: "")
    monkeypatch.delenv("NF4_CUDA_ARCHS", raising=False)
    return tmp_path / "called"


def test_without_a_gpu_no_cuda_source_is_compiled(
    no_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["build", "--native"])
    monkeypatch.setattr(build, "build_cpu", lambda *_: "libnf4_cpu.so")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert build.main() == 0
    assert "left out: nvidia-smi finds no GPU" in capsys.readouterr().out
    assert not no_gpu.exists()


def test_the_check_compiles_every_cuda_source_for_one_gpu(
    no_gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "csrc"
    (sources / "cuda" / "some_sm90").mkdir(parents=True)
    for name in ("all.cu", "some_sm90/hopper.cu"):
        (sources / "cuda" / name).write_text("")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\n[ $# = 1 ] && echo "--Ofast-compile" && exit\n'
        f'for last; do :; done; echo object > "$last"; echo "$@" >> {no_gpu}\n'
    )
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["build", "--check-cuda"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert build.main() == 0
    compiled = [line.split() for line in no_gpu.read_text().splitlines() if " -c " in line]
    assert [words[words.index("-c") + 1] for words in compiled] == ["cuda/all.cu", "cuda/some_sm90/hopper.cu"]
    for words in compiled:
        assert [word for word in words if "gencode" in word] == ["-gencode=arch=compute_90a,code=sm_90a"]
        assert "--Ofast-compile=max" in words
    # What is compiled to find errors is not where libraries are looked for.
    assert not list((tmp_path / "lib").glob("*.so"))


def test_the_build_runs_without_torch() -> None:
    code = (
        "import runpy, sys; sys.argv = ['build.py', '--help']\n"
        "try: runpy.run_path('nf4_kernels/build.py', run_name='__main__')\n"
        "except SystemExit: import nf4_kernels.library_files; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=build.ROOT.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.slow
def test_linear_rows_is_more_than_a_trap_where_plans_have_it(tmp_path: Path) -> None:
    """The kernel traps where shared memory does not begin where it should; the compiler knows, and drops the rest."""
    nvcc = build.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc here")
    source, archs = tmp_path / "some.cu", build.CUDA_ARCHS.split(";")
    source.write_text(
        '#include "cuda/rows/linear_rows.cuh"\n'
        + "".join(
            f"template __global__ void nf4::linear_rows<__nv_bfloat16, 16, 4, true, false, {last}>"
            "(const __grid_constant__ nf4::RowsArgs);\n"
            for last in ("false, false", "true, false", "true, true")
        )
    )
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    command = [
        nvcc, "-std=c++17", "-I", str(build.SOURCES), *targets, "-Xptxas", "-v", "-c", str(source),
        "-o", str(tmp_path / "some.o"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.findall(r"for 'sm_(\d+)a?'.*?Used (\d+) registers", done.stdout + done.stderr, re.DOTALL)
    assert len(found) == 3 * len(archs)
    for arch, registers in found:
        assert (int(registers) > 40) == (arch in ("90", "100")), (arch, registers)
