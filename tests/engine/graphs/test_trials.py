"""Attempts side by side, without a GPU."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.graph_backend import DecodeForm
from server.engine.runtime.attention.kernels.decode.trial import compile_forms
from server.engine.runtime.attention.kernels.kv_cache import Kind
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
        together.wait(60)
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


def test_attention_is_compiled_in_the_forms_that_a_kind_of_layer_has(device: torch.device) -> None:
    plain, tiled = DecodeForm(True, True, 0), DecodeForm(True, False, 32)
    launched: list[tuple[int, DecodeForm]] = []

    def attend(
        cache: Any, query: Any, key: Any, value: Any, options: Any, rotary: Any, tile: int, sinks: torch.Tensor | None
    ) -> None:
        assert key.shape[1:] == value.shape[1:] == (1, 64)
        norms = rotary is not None and rotary.norms is not None
        launched.append((query.shape[1], DecodeForm(rotary is not None, norms, tile)))

    decode: Any = SimpleNamespace(plan=lambda *_: None, attend=attend)
    kinds = [Kind(heads, 1, 64, AttentionOptions(1.0)) for heads in (4, 6)]
    compile_forms(decode, [(torch.zeros(3, 2, 4, 1, 64), kind, None) for kind in kinds], [plain, tiled])
    none = DecodeForm(False, False, 0)
    # Rows of 6 heads of 64 are no multiple of 256 long, so no result of them is tiled.
    assert len(launched) == 5
    assert set(launched) == {(4, none), (4, plain), (4, tiled), (6, none), (6, plain)}
