"""The device that engine.device means, where a GPU cannot be used as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server.config import EngineConfig
from server.engine.runtime import limits
from server.engine.runtime.limits import EngineConfigError, resolve_device

CPU = (torch.device("cpu"), torch.float32)


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a Tesla T4."""
    limits._say_why_cpu.cache_clear()
    monkeypatch.delenv("NF4_POSE_AS", raising=False)
    monkeypatch.setattr(limits, "_DRIVER_FILES", (str(tmp_path),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")


def test_a_gpu_without_kernels_is_left_alone_or_refused_by_name(
    old_gpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert resolve_device(EngineConfig()) == CPU
    assert caplog.text.count("runs on the CPU, as the GPU cannot be used: Tesla T4 has compute capability 7.5") == 1
    with pytest.raises(
        EngineConfigError, match=r"^engine\.device is cuda, but .*: Tesla T4 has compute capability 7\.5"
    ):
        resolve_device(EngineConfig(device="cuda"))


def test_a_gpu_of_today_is_used(old_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert resolve_device(EngineConfig()) == (torch.device("cuda", 0), torch.bfloat16)


def test_a_driver_that_is_too_old_is_named(
    old_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    assert resolve_device(EngineConfig()) == CPU
    assert "as the GPU cannot be used: The NVIDIA driver on your system is too old" in caplog.text


def test_without_a_gpu_nothing_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(limits, "_DRIVER_FILES", ())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(EngineConfig()) == CPU
    assert not caplog.text
