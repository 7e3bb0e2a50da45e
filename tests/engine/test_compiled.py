"""Compiled decoder layers: the same logits as transformers' code, one compilation for layers that are alike."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from server.config import EngineConfig
from server.engine.runtime import compiled
from server.engine.runtime.runner import ModelRunner
from server.engine.scheduling.scheduler import Chunk, Step
from tests.engine.factories import make_sequence
from tests.engine.models import tiny_model

CONFIG = EngineConfig(device="cpu", block_size=4, kv_cache_bytes=2**20)


def logits(runner: ModelRunner) -> list[torch.Tensor]:
    """Of a prefill, of two prefills with a decode, and of a decode."""
    a, b, c = make_sequence(21), make_sequence(2), make_sequence(9)
    for i, sequence in enumerate((a, b, c)):
        sequence.blocks = list(range(10 * i, 10 * i + 8))
    found = [runner.forward(Step([Chunk(a, 0, 21, True)]))]
    a.append(5, 100)
    found.append(runner.forward(Step([Chunk(a, 21, 1, True), Chunk(b, 0, 2, True), Chunk(c, 0, 9, True)])))
    a.append(7, 100)
    found.append(runner.forward(Step([Chunk(a, 22, 1, True)])))
    return found


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The layers that were compiled."""
    seen: list[nn.Module] = []
    compile_one = compiled._compile

    def counted(layer: nn.Module, signature: Any) -> Any:
        seen.append(layer)
        return compile_one(layer, signature)

    monkeypatch.setattr(compiled, "_compile", counted)
    return seen


@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("gemma3_text", 2)])
def test_compiled_layers_give_the_same_logits(
    family: str, kinds: int, compilations: list[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    runner = ModelRunner(tiny_model(family), CONFIG)
    expected = logits(runner)
    with caplog.at_level(logging.WARNING):
        runner.prepare(CONFIG, lambda stage, fraction: None)
    assert not caplog.records
    # For few tokens and for many.
    assert len(compilations) == 2 * kinds
    for found, wanted in zip(logits(runner), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_layers_that_cannot_be_compiled_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no compiler")

    runner = ModelRunner(tiny_model("llama"), CONFIG)
    expected = logits(runner)
    monkeypatch.setattr(compiled, "_compile", refuse)
    runner.prepare(CONFIG, lambda stage, fraction: None)
    assert "LlamaDecoderLayer: no compiler" in caplog.text
    for found, wanted in zip(logits(runner), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_compiled_layers_that_are_off_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(layer: nn.Module, _: Any) -> Any:
        return lambda hidden, *others: hidden * 2

    runner = ModelRunner(tiny_model("llama"), CONFIG)
    expected = logits(runner)
    monkeypatch.setattr(compiled, "_compile", wrong)
    runner.prepare(CONFIG, lambda stage, fraction: None)
    assert "compiled layers are off" in caplog.text
    for found, wanted in zip(logits(runner), expected, strict=True):
        torch.testing.assert_close(found, wanted)
