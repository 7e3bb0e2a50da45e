"""Fused launches are counted as they run, beside those that the model's structure and the device allow."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from nf4_kernels import ops
from server.engine.runtime.attention.calls import IMPLEMENTATION, attending
from server.engine.runtime.attention.graph_backend import DecodeForm
from server.engine.runtime.graphs.fused_launches import (
    FusedLaunches,
    count_fused,
    decode_forms,
    possible_launches,
    report_fused,
)
from server.engine.runtime.model.lora_table import AdapterTable
from server.engine.runtime.model.projections import NF4Linear
from tests.engine.compile.fusing import BF16, Around, always, compiled, fusing, sixteen
from tests.engine.compile.test_fusion import logits, nf4_model
from tests.engine.compile.test_rotary import Uncached
from tests.engine.compile.test_tiled_inputs import SIZES, thirty_two


@pytest.fixture
def every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has every fused launch."""
    monkeypatch.setattr(ops, "can_fuse", always)
    monkeypatch.setattr(ops, "can_gate", sixteen)
    monkeypatch.setattr(ops, "token_tile", thirty_two)


def counted(family: str, **sizes: Any) -> tuple[FusedLaunches | None, FusedLaunches]:
    """The fused launches of a model of two layers whose code is compiled, and the possible ones."""
    model = nf4_model(family, layers=2, **sizes)
    model.set_attn_implementation(IMPLEMENTATION)
    with torch.inference_mode(), attending(Uncached()), fusing(applies_rotary=True, tile_of=thirty_two) as graphs:
        for layer in model.get_decoder().layers:
            layer.forward = compiled(layer.forward)
        logits(model, 40)
        compilations = len(graphs)
        found = count_fused(lambda: logits(model, 40))
        assert len(graphs) == compilations  # counting compiles nothing anew
        return found, possible_launches(model, 40, applies_rotary=True)


@pytest.mark.usefixtures("every_launch")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_possible_launch_is_counted_over_all_layers(family: str) -> None:
    found, possible = counted(family, **SIZES)
    assert found == possible == FusedLaunches(norms=4, residuals=4, gates=2, rotary=2, tiled=4)


@pytest.mark.usefixtures("every_launch")
@torch.inference_mode()
def test_launches_of_inductors_code_are_counted() -> None:
    module = Around(lambda m, h: m.second(m.norm(h + m.first(h))))
    h = torch.randn(1, 3, 64, dtype=BF16)
    with fusing():
        function = compiled(module, backend="inductor")
        function(h)
        assert count_fused(lambda: function(h)) == FusedLaunches(norms=1, residuals=1)


@pytest.mark.usefixtures("every_launch")
def test_what_a_model_cannot_fuse_is_not_possible() -> None:
    """Gemma adds an offset to norms' weights, and has norms between its GEMMs and residual sums."""
    found, possible = counted("gemma3_text", **SIZES, layer_types=["full_attention"] * 2)
    assert found == possible == FusedLaunches(gates=2, rotary=2, tiled=4)


@pytest.mark.usefixtures("every_launch")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_forms_of_attention_by_size(family: str) -> None:
    model, norms = nf4_model(family, layers=2, **SIZES), family == "qwen3"
    tiled, plain = DecodeForm(True, norms, 32), DecodeForm(True, norms, 0)
    assert decode_forms(model, [1, 4, 8, 200], 8) == {DecodeForm(False, False, 0), tiled}
    for module in model.modules():
        if isinstance(module, NF4Linear):
            module.expanded = module.packed
    assert decode_forms(model, [NF4Linear.EXPANDED_FROM - 1], 8) == {tiled}
    assert decode_forms(model, [NF4Linear.EXPANDED_FROM], 8) == {plain}
    assert decode_forms(nf4_model(family, torch.float16, layers=2, **SIZES), [8], 8) == {plain}


@pytest.mark.usefixtures("every_launch")
def test_projections_with_adapters_are_not_possible() -> None:
    model = nf4_model("llama")
    names = {name for name, _ in model.named_modules() if name.endswith(("o_proj", "up_proj"))}
    AdapterTable(model, model.get_decoder().layers, 2, 4, names)
    assert possible_launches(model, 40, applies_rotary=True) == FusedLaunches(norms=1, residuals=1, rotary=1)


@pytest.mark.usefixtures("every_launch")
def test_gemms_of_float16_are_not_possible() -> None:
    assert possible_launches(nf4_model("llama", torch.float16), 40, applies_rotary=True) == FusedLaunches(rotary=1)


def test_without_fused_launches_nothing_is_possible_and_nothing_said(caplog: pytest.LogCaptureFixture) -> None:
    model = nf4_model("llama")
    possible = possible_launches(model, 40, applies_rotary=False)
    assert possible == FusedLaunches()
    with caplog.at_level(logging.INFO):
        report_fused(FusedLaunches(), possible)
    assert not caplog.records


def test_the_report_warns_of_what_is_never_fused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        report_fused(FusedLaunches(0, 127, 64, 64, 0), FusedLaunches(128, 128, 64, 64, 0))
    line, warning = caplog.records
    assert line.getMessage() == "fused: norms 0/128, residuals 127/128, gates 64/64, rotary 64/64"
    assert (line.levelno, warning.levelno) == (logging.INFO, logging.WARNING)
    assert warning.getMessage().startswith("none of 128 norms is fused")


def test_a_pass_that_cannot_be_counted_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("no such mode")

    with caplog.at_level(logging.INFO):
        assert count_fused(fails) is None
    assert "fused launches cannot be counted: RuntimeError: no such mode" in caplog.text
