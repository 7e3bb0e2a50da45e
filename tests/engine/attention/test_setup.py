"""The choice of attention on CUDA, and FlashInfer's loading behind it: its compiler, and going on without it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nf4_kernels import build
from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.factory import create_backend, cuda_error, try_layers
from server.engine.runtime.attention.flashinfer.compiler import missing_compiler, prepare_compiler, toolkit
from server.engine.runtime.attention.flashinfer.prefill import _environment, load_in_background
from server.engine.runtime.attention.kernels.kv_cache import Kind
from server.engine.runtime.attention.sdpa import SdpaBackend
from server.engine.runtime.batch import Batch
from server.engine.runtime.trials import summary

SHAPES = [LayerShape(2, 64, 64, heads=4), LayerShape(1, 128, 128, heads=4)]
OPTIONS = [AttentionOptions(0.125), AttentionOptions(0.1, window=16, softcap=30.0)]
# Tensors without data: what decides about FlashInfer takes any device but the CPU for one that it could run on.
META = torch.device("meta")


@pytest.fixture(autouse=True)
def _ask_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_error.cache_clear()
    _environment.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", os.environ["PATH"])
    for name in ("CUDA_HOME", "FLASHINFER_LOGGING_LEVEL"):
        # Set and deleted, so that what the code under test sets is taken back as well.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def wheels(place: Path) -> Path:
    """The folders and names of NVIDIA's wheels for nvcc."""
    folder = place / "nvidia" / "cu13"
    for name in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "lib/libcudart_static.a"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    return folder


def only_wheels(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No CUDA toolkit in the machine, but for the wheels below place."""
    monkeypatch.setattr(build, "SYSTEM_NVCC", str(place / "none"))
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return wheels(place)


def test_wheels_become_a_toolkit_that_can_be_linked_with(tmp_path: Path) -> None:
    source = wheels(tmp_path / "site")
    # A runtime that a linker takes.
    library = ["c++", "-shared", "-Wl,-soname,libcudart.so.13", "-x", "c++", "/dev/null", "-o"]
    subprocess.run([*library, str(source / "lib" / "libcudart.so.13")], check=True)
    home = toolkit(source, tmp_path / "cache")
    assert (home / "bin" / "nvcc").samefile(source / "bin" / "nvcc")
    assert (home / "include" / "cuda.h").exists()
    assert (home / "nvvm" / "bin" / "cicc").exists()
    # As FlashInfer links what it has compiled.
    flags = ["-shared", f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
    subprocess.run(["c++", "-x", "c++", "/dev/null", "-o", str(tmp_path / "module.so"), *flags], check=True)


def test_a_toolkit_is_made_once_and_again_when_its_wheels_have_gone(tmp_path: Path) -> None:
    source, cache = wheels(tmp_path / "site"), tmp_path / "cache"
    home = toolkit(source, cache)
    made = (home / "lib64").stat().st_ino
    assert toolkit(source, cache) == home
    assert (home / "lib64").stat().st_ino == made
    (source / "lib" / "libcudart.so.13").rename(source / "lib" / "libcudart.so.14")
    assert toolkit(source, cache) == home
    assert (home / "lib64" / "libcudart.so").samefile(source / "lib" / "libcudart.so.14")
    assert [path.name for path in cache.iterdir()] == [home.name]
    assert toolkit(wheels(tmp_path / "other"), cache) != home


def test_cuda_home_is_set_for_wheels_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = only_wheels(tmp_path / "site", monkeypatch)
    prepare_compiler(tmp_path / "cache")
    assert Path(os.environ["CUDA_HOME"], "bin", "nvcc").samefile(source / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    (tmp_path / "toolkit").symlink_to(source)
    prepare_compiler(tmp_path / "cache")
    assert os.environ["CUDA_HOME"] == str(tmp_path / "toolkit")


def test_pips_ninja_is_found_without_activating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    prepare_compiler(tmp_path / "cache")
    assert os.environ["PATH"].split(os.pathsep) == [str(tmp_path), str(Path(sys.executable).parent)]


def test_a_missing_compiler_is_named_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SYSTEM_NVCC", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvcc" in str(missing_compiler())
    assert "nf4-server[build-cuda]" in str(missing_compiler())
    nvcc = wheels(tmp_path) / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(nvcc.parents[1]))
    assert "apt-get install g++" in str(missing_compiler())
    monkeypatch.setenv("CXX", str(nvcc))
    assert "ninja" in str(missing_compiler())
    (tmp_path / "ninja").symlink_to(nvcc)
    assert missing_compiler() is None


def test_without_triton_one_line_says_what_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for _ in range(2):  # the engine makes a backend to measure memory, and then the one that it keeps
        assert isinstance(create_backend(SHAPES, OPTIONS, 3, 16, torch.bfloat16, META), SdpaBackend)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "SDPA" in caplog.text
    assert "Triton is not installed" in caplog.text


def test_our_kernels_are_not_asked_for_what_they_cannot_do() -> None:
    assert "float32" in str(cuda_error(tuple(SHAPES), tuple(OPTIONS), 16, torch.float32, META))


KINDS = [
    Kind(shape.heads, shape.kv_heads, shape.key_dim, options) for shape, options in zip(SHAPES, OPTIONS, strict=True)
]


def used(_: object) -> None:
    raise AssertionError("FlashInfer was used")


def test_nothing_is_loaded_for_layers_that_flashinfer_does_not_take() -> None:
    assert load_in_background(KINDS[1:], 16, torch.bfloat16, META, used) is None
    assert load_in_background(KINDS, 16, torch.float32, META, used) is None


def test_a_flashinfer_that_fails_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only_wheels(tmp_path, monkeypatch)
    for name in ("c++", "ninja"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise ImportError('no module for it:\\n tvm')\n")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    loading = load_in_background(KINDS, 16, torch.bfloat16, META, used)
    assert loading is not None
    loading.join()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.endswith("FlashInfer fails: ImportError: no module for it:")
    # FlashInfer's own logger writes past ours, in a format of its own.
    assert os.environ["FLASHINFER_LOGGING_LEVEL"] == "error"


def test_each_kind_of_layer_is_tried_once() -> None:
    class Recording(SdpaBackend):
        def begin(self, batch: Batch) -> None:
            super().begin(batch)
            self.tried: list[int] = []

        def attend(
            self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
        ) -> torch.Tensor:
            self.tried.append(layer)
            return super().attend(layer, query, key, value, options)

    shapes, options = SHAPES + SHAPES, OPTIONS + OPTIONS
    backend = Recording(shapes, 3, 16, torch.float32, torch.device("cpu"))
    for tokens in (1, 16, 48):
        try_layers(backend, shapes, options, 16, torch.float32, torch.device("cpu"), tokens)
        assert backend.tried == [0, 1]


def test_a_compilers_error_is_what_is_told() -> None:
    output = (
        "Ninja build failed. Ninja output:\n[1/3] nvcc ...\nk.cu(3): error: identifier is undefined\nninja: stopped"
    )
    assert summary(RuntimeError(output)) == "RuntimeError: k.cu(3): error: identifier is undefined"
    assert summary(KeyError()) == "KeyError: no message"
