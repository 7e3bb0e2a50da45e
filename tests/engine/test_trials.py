"""Attempts side by side, without a GPU."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

from server.engine.runtime.trials import failure, side_by_side


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that may be the current one on machines without it."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return torch.device("cuda", 0)


def test_all_run_at_the_same_time_in_inference_mode(device: torch.device) -> None:
    together = threading.Barrier(3)
    modes: list[bool] = []

    def attempt() -> None:
        together.wait(20)
        modes.append(torch.is_inference_mode_enabled())

    side_by_side([attempt] * 3, device)
    assert modes == [True] * 3


def fails() -> None:
    raise ValueError("this kernel")


def test_a_failure_is_raised_when_all_have_ended(device: torch.device) -> None:
    ended = []
    with pytest.raises(ValueError, match="this kernel"):
        side_by_side([fails, lambda: ended.append(1)], device)
    assert ended
    failed = failure(lambda: side_by_side([lambda: None, fails], device))
    assert failed == "ValueError: this kernel"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_what_says_nothing_of_the_attempts_comes_first(error: type[Exception], device: torch.device) -> None:
    def lost() -> None:
        raise error("the device")

    with pytest.raises(error):
        failure(lambda: side_by_side([fails, lost, fails], device))
