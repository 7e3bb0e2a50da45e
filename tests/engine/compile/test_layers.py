"""Compiled decoder layers: the same logits as transformers' code, one compilation for layers that are alike."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from server.config import WRITTEN_LAYERS_VARIABLE, EngineConfig
from server.engine.runtime.compile import artifacts, layers
from server.engine.runtime.compile.compiled_layer import CompiledLayer
from server.engine.runtime.model.decoder import decoder_layers
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from server.engine.scheduling.block_tables import BlockTables
from server.engine.scheduling.step import Chunk, Step
from tests.engine.factories import make_sequence
from tests.engine.models import tiny_model


@pytest.fixture(autouse=True)
def _no_written_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that could be written ones are compiled, too."""
    monkeypatch.setenv(WRITTEN_LAYERS_VARIABLE, "0")


CONFIG = EngineConfig(device="cpu", block_size=4, kv_cache_bytes=2**20)
EAGER = CONFIG.model_copy(update={"enforce_eager": True})


def logits(runner: ModelRunner) -> list[torch.Tensor]:
    """The logits of a prefill, of two prefills with a decode, and of a decode."""
    a, b, c = make_sequence(21), make_sequence(2), make_sequence(9)
    tables = BlockTables(3, 8)
    for i, sequence in enumerate((a, b, c)):
        sequence.blocks = list(range(10 * i, 10 * i + 8))
        sequence.take_row(tables)
    found = [runner.forward(Step([Chunk(a, 0, 21, True)]))]
    a.append(5)
    found.append(runner.forward(Step([Chunk(a, 21, 1, True), Chunk(b, 0, 2, True), Chunk(c, 0, 9, True)])))
    a.append(7)
    found.append(runner.forward(Step([Chunk(a, 22, 1, True)])))
    return found


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[nn.Module]:
    """The layers that were compiled; none has been kept before."""
    monkeypatch.setattr(artifacts, "default_cache_dir", lambda: tmp_path)
    seen: list[nn.Module] = []
    compile_one = layers._compile

    def counted(layer: nn.Module, signature: Any) -> Any:
        seen.append(layer)
        return compile_one(layer, signature)

    monkeypatch.setattr(layers, "_compile", counted)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_later_start_uses_what_an_earlier_one_compiled(family: str, compilations: list[nn.Module]) -> None:
    plain = [logits(build_runner(tiny_model(family, seed), EAGER)) for seed in (0, 1)]
    runners = [build_runner(tiny_model(family, 0), CONFIG)]
    first = len(compilations)
    runners.append(build_runner(tiny_model(family, 1), CONFIG))
    assert first > 0
    assert len(compilations) == first
    # With weights of its own, and its configuration's.
    for runner, expected in zip(runners, plain, strict=True):
        for found, wanted in zip(logits(runner), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    build_runner(tiny_model(family, rms_norm_eps=0.1), CONFIG)
    assert len(compilations) == 2 * first


@pytest.mark.slow
def test_a_damaged_kept_layer_is_compiled_anew(compilations: list[nn.Module], tmp_path: Path) -> None:
    build_runner(tiny_model("llama"), CONFIG)
    kept = list(tmp_path.rglob("*.bin"))
    assert len(kept) == len(compilations) == 2
    for path in kept:
        path.write_bytes(path.read_bytes()[:1000])
    expected = logits(build_runner(tiny_model("llama"), EAGER))
    runner = build_runner(tiny_model("llama"), CONFIG)
    assert len(compilations) == 4
    for found, wanted in zip(logits(runner), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", 1),
        pytest.param("gpt2", 1, marks=pytest.mark.slow),
        pytest.param("gptj", 1, marks=pytest.mark.slow),
        pytest.param("codegen", 1, marks=pytest.mark.slow),
        pytest.param("gemma3_text", 2, marks=pytest.mark.slow),
        pytest.param("gemma3n_text", 4, marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_give_the_same_logits(
    family: str, kinds: int, compilations: list[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(build_runner(tiny_model(family), EAGER))
    with caplog.at_level(logging.INFO):
        runner = build_runner(tiny_model(family), CONFIG)
    assert all(isinstance(layer.forward, CompiledLayer) for layer in decoder_layers(runner._paged.model))
    ours = [record for record in caplog.records if record.name.startswith("server")]
    assert not [record for record in ours if record.levelno >= logging.WARNING]
    # The passes that fuse launches do not run on CPU.
    assert "fused" not in caplog.text
    # For few tokens and for many.
    assert len(compilations) == 2 * kinds
    for found, wanted in zip(logits(runner), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_layers_that_cannot_be_compiled_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no compiler")

    expected = logits(build_runner(tiny_model("llama"), EAGER))
    monkeypatch.setattr(layers, "_kept", refuse)
    runner = build_runner(tiny_model("llama"), CONFIG)
    assert "LlamaDecoderLayer: no compiler" in caplog.text
    for found, wanted in zip(logits(runner), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_compiled_layers_that_are_off_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*_: object) -> Any:
        return lambda hidden, *others: hidden * 2

    expected = logits(build_runner(tiny_model("llama"), EAGER))
    monkeypatch.setattr(layers, "_kept", wrong)
    runner = build_runner(tiny_model("llama"), CONFIG)
    assert "compiled layers are off" in caplog.text
    for found, wanted in zip(logits(runner), expected, strict=True):
        torch.testing.assert_close(found, wanted)
