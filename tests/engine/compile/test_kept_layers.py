"""Layers of captured steps, which a later start reads: the same outputs, compiled once for what their code depends on."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from transformers import PreTrainedModel

from server.engine.runtime.compile import artifacts, kept_layers
from server.engine.runtime.compile.artifacts import artifact_path
from server.engine.runtime.compile.kept_layers import KeptLayers
from server.engine.runtime.compile.signatures import structure_of
from server.engine.runtime.graphs.captured_layers import compiled_layers
from tests.engine.models import tiny_model


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[nn.Module]:
    """The layers that were compiled; none has been kept before."""
    monkeypatch.setattr(artifacts, "default_cache_dir", lambda: tmp_path)
    seen: list[nn.Module] = []
    compile_one = kept_layers.compile_ahead

    def counted(layer: nn.Module, *others: Any) -> Any:
        seen.append(layer)
        return compile_one(layer, *others)

    monkeypatch.setattr(kept_layers, "compile_ahead", counted)
    return seen


def check(model: PreTrainedModel, size: int, kept: KeptLayers, applies_rotary: bool = True) -> None:
    """Compare the logits of size tokens with those of the model's own layers."""
    forwards = [layer.forward for layer in model.model.layers]
    ids = torch.arange(3, 3 + size)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        with compiled_layers(model, size, applies_rotary, kept=kept):
            torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    assert [layer.forward for layer in model.model.layers] == forwards


def test_a_later_start_reads_them(compilations: list[nn.Module]) -> None:
    check(tiny_model("llama", 0), 5, KeptLayers())
    # All layers are of one kind.
    assert len(compilations) == 1
    # With weights of its own, from another folder.
    other = tiny_model("llama", 1)
    other.config._name_or_path = "elsewhere"
    check(other, 5, KeptLayers())
    assert len(compilations) == 1


def test_what_no_start_reads_is_removed(compilations: list[nn.Module], tmp_path: Path) -> None:
    folder = tmp_path / "compiled" / "layers"
    check(tiny_model("llama"), 5, KeptLayers())
    (kept,) = folder.glob("*.bin")
    unread = folder / "another.bin"
    unread.touch()
    for path in (kept, unread):
        os.utime(path, (0, time.time() - artifacts.KEPT_UNUSED_S - 60))
    check(tiny_model("llama"), 5, KeptLayers())
    assert unread.exists()
    check(tiny_model("llama"), 4, KeptLayers())
    assert kept in folder.glob("*.bin")
    assert not unread.exists()
    assert len(compilations) == len([*folder.iterdir()]) == 2


@pytest.mark.slow
def test_each_size_pass_and_configuration_has_its_own(compilations: list[nn.Module]) -> None:
    kept = KeptLayers()
    check(tiny_model("llama"), 8, kept)
    check(tiny_model("llama"), 5, kept)
    assert len(compilations) == 2
    check(tiny_model("llama"), 5, kept, applies_rotary=False)
    assert len(compilations) == 3
    check(tiny_model("llama", rms_norm_eps=0.1), 5, kept)
    assert len(compilations) == 4
    check(tiny_model("llama"), 8, kept)
    assert len(compilations) == 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_other_families(family: str, compilations: list[nn.Module]) -> None:
    check(tiny_model(family, 0), 5, KeptLayers())
    first = len(compilations)
    check(tiny_model(family, 1), 5, KeptLayers())
    assert len(compilations) == first > 0


@pytest.mark.slow
def test_layers_that_share_keys_are_left_to_torch(
    compilations: list[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        check(tiny_model("gemma3n_text"), 5, KeptLayers())
    assert "graphs' layers are traced at every start: Gemma3nTextDecoderLayer: CompileError: argument" in caplog.text
    assert not compilations


def test_layers_that_cannot_be_compiled_ahead_are_tried_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tried: list[nn.Module] = []

    def refuse(layer: nn.Module, *_: object) -> None:
        tried.append(layer)
        raise RuntimeError("no compiler\nof any kind")

    monkeypatch.setattr(artifacts, "default_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(kept_layers, "compile_ahead", refuse)
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)
    kept = KeptLayers()
    with caplog.at_level(logging.INFO):
        check(tiny_model("llama"), 5, kept)
        check(tiny_model("llama"), 8, kept)
    assert len(tried) == 1
    assert "LlamaDecoderLayer: RuntimeError: no compiler" in caplog.text


def test_memory_that_runs_out_is_not_taken_for_a_layer_that_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("all gone")

    monkeypatch.setattr(artifacts, "default_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(kept_layers, "compile_ahead", exhausted)
    model = tiny_model("llama")
    with pytest.raises(torch.OutOfMemoryError, match="all gone"):
        check(model, 5, KeptLayers())
    assert all("forward" not in vars(layer) for layer in model.model.layers)


def test_what_does_not_run_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> Any:
        def run(*_: object) -> None:
            raise RuntimeError("cannot be launched")

        return run

    monkeypatch.setattr(artifacts, "default_cache_dir", lambda: tmp_path)
    monkeypatch.setattr(kept_layers, "kept_function", broken)
    model = tiny_model("llama")
    removed: list[Path] = []
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: removed.append(path))
    with pytest.raises(RuntimeError, match="cannot be launched"):
        check(model, 5, KeptLayers())
    (path,) = removed
    assert path.parent == tmp_path / "compiled" / "layers"
    assert all("forward" not in vars(layer) for layer in model.model.layers)


@pytest.mark.parametrize(
    ("one", "other"),
    [(torch.relu, torch.tanh), (torch.float16, torch.bfloat16), (nn.functional.silu, nn.functional.gelu), (1, 2)],
)
def test_layers_of_other_attributes_are_of_another_kind(one: object, other: object) -> None:
    layers = [nn.Linear(2, 2) for _ in range(3)]
    for layer, value in zip(layers, (one, other, one), strict=True):
        layer.own = value  # type: ignore[assignment]
    first, second, third = map(structure_of, layers)
    assert repr(first) == repr(third)
    assert first != second


@pytest.mark.slow
def test_code_of_passes_without_a_name_is_not_kept(compilations: list[nn.Module]) -> None:
    class Nameless(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            pass

        def uuid(self) -> None:
            return None

    with torch._inductor.config.patch(post_grad_custom_pre_pass=Nameless()):
        check(tiny_model("llama"), 5, KeptLayers())
    assert not compilations


def test_the_users_own_settings_of_the_compilers_are_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    before = artifact_path(device, "kind")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert artifact_path(device, "kind") == before
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert artifact_path(device, "kind") != before


@pytest.mark.parametrize("size", [1, 3])
def test_embeddings_are_gathered_where_they_only_read_rows(size: int) -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    model = tiny_model("llama")
    table = model.get_input_embeddings()
    ids = torch.tensor([[5, 0, 5]])
    expected = table(ids)
    with compiled_layers(model, size, False):
        assert ("forward" in vars(table)) == (size > 1)
        assert torch.equal(table(ids), expected)
    assert "forward" not in vars(table)
    scaled = Scaled(*table.weight.shape)
    model.set_input_embeddings(scaled)
    with compiled_layers(model, size, False):
        assert "forward" not in vars(scaled)
