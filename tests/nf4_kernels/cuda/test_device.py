"""The compute capability by which kernels are chosen, a GPU's own or the one that NF4_POSE_AS names."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nf4_kernels import build
from nf4_kernels.cuda import device, library
from nf4_kernels.plan.moe_rows import moe_rows_instances

HOPPER = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def own_capability(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of capability 9.0, and nothing remembered of the environment."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "")  # so that it is put back
    monkeypatch.delenv("TRITON_OVERRIDE_ARCH")
    device._posed.cache_clear()
    yield
    device._posed.cache_clear()


def test_a_gpu_is_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NF4_POSE_AS", raising=False)
    assert device.capability(HOPPER) == (9, 0)
    assert device.arch(HOPPER) == 90


@pytest.mark.parametrize(("value", "capability"), [("86", (8, 6)), ("80", (8, 0)), ("90", (9, 0))])
def test_a_gpu_poses_as_an_older_one(value: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NF4_POSE_AS", value)
    assert device.capability(HOPPER) == capability
    assert device.arch(HOPPER) == int(value)
    assert os.environ["TRITON_OVERRIDE_ARCH"] == f"sm{value}"


@pytest.mark.parametrize("value", ["120", "8.6", "6", "", "sm_86"])
def test_what_it_cannot_pose_as_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NF4_POSE_AS", value)
    with pytest.raises(ValueError, match="NF4_POSE_AS"):
        device.capability(HOPPER)


def test_a_gpu_that_is_too_old_is_named_and_nothing_is_compiled_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NF4_POSE_AS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(library, "library", lambda: pytest.fail("a library is looked for"))
    assert device.too_old(HOPPER) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert library.load_error.__wrapped__() == "Tesla T4 has compute capability 7.5, and 8.0 or newer is needed"


def test_a_library_for_other_gpus_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NF4_POSE_AS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    status = 209
    messages = {209: b"no kernel image", 35: b"CUDA driver version is insufficient"}
    loaded = SimpleNamespace(nf4_cuda_has_code=lambda: status, nf4_cuda_error=messages.__getitem__)
    monkeypatch.setattr(library, "library", lambda: loaded)
    monkeypatch.setattr(library, "cuda_library", lambda: "here.so")
    assert library.load_error.__wrapped__() == (
        "here.so was compiled for other GPUs (no kernel image): python -m nf4_kernels.build --native"
    )
    status = 35
    reason = "here.so cannot be used: CUDA driver version is insufficient (CUDA error 35)"
    assert library.load_error.__wrapped__() == reason
    status = 0
    assert library.load_error.__wrapped__() is None


@pytest.mark.parametrize(("code", "gpu"), [(80, 86), (86, 89)])
def test_code_has_the_kernels_that_plans_choose_on_each_gpu_that_runs_it(code: int, gpu: int, tmp_path: Path) -> None:
    if (nvcc := build.find_nvcc()) is None:
        pytest.skip("there is no nvcc")
    layouts = (", ".join(map(str, instance)) for instance in moe_rows_instances(gpu))
    checks = (f"static_assert(nf4::kIsPlanned<nf4::MoeLayout<{one}, true>::total(2)>);" for one in layouts)
    source = tmp_path / "planned.cu"
    source.write_text("\n".join(('#include "cuda/moe/rows_layout.cuh"', "#ifdef __CUDA_ARCH__", *checks, "#endif")))
    options = ("-std=c++17", f"-arch=compute_{code}", "-I.", "-ptx", "-o", tmp_path / "planned.ptx")
    subprocess.run([nvcc, *options, source], cwd=build.SOURCES, check=True)


@pytest.mark.gpu
def test_a_library_knows_whether_it_has_code_for_this_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    major, minor = torch.cuda.get_device_capability()
    found = {}
    for arch in (f"{major}{minor}", "80" if major > 8 else "120"):
        path = tmp_path / f"{arch}.so"
        options = (
            f"-gencode=arch=compute_{arch},code=sm_{arch}",
            "-std=c++17",
            "-Xcompiler",
            "-fPIC",
            "-shared",
            "-I.",
        )
        nvcc = build.find_nvcc()
        assert nvcc is not None
        subprocess.run([nvcc, *options, "cuda/library.cu", "-o", path], cwd=build.SOURCES, check=True)
        loaded = ctypes.CDLL(str(path))
        found[arch] = [loaded.nf4_cuda_has_code(), torch.ones(1, device="cuda").item()]
    assert list(found.values()) == [[0, 1], [209, 1]]
