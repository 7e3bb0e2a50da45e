"""Where the build looks for nvcc."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nf4_kernels import build


def executable(path: Path) -> str:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_nvcc_of_nvidias_wheels_is_found_where_no_other_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "SYSTEM_NVCC", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    assert build.find_nvcc() is None
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
