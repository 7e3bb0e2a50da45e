"""The compute capability by which kernels are chosen, a GPU's own or the one that NF4_POSE_AS names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nf4_kernels.cuda import device, library

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


def test_a_library_for_other_gpus_is_named_with_the_cure() -> None:
    loaded: Any = SimpleNamespace(nf4_cuda_error=lambda status: b"no kernel image" if status == 209 else b"other")
    with pytest.raises(
        library.KernelError, match=r"no kernel image \(CUDA error 209\); .* nf4_kernels\.build --native"
    ):
        library.raise_for(loaded, 209, "rows")
    with pytest.raises(library.KernelError, match=r"^rows: other \(CUDA error 1\)$"):
        library.raise_for(loaded, 1, "rows")
