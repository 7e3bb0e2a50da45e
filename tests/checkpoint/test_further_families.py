"""Families that few people serve, from an NF4 checkpoint: served with transformers' tokens, or refused by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit

from nf4_kernels.format import Weight
from nf4_kernels.reference import dequantize
from server.checkpoint.base import CheckpointError
from server.checkpoint.experts.module import NF4Experts
from server.checkpoint.loading import load_model
from server.engine.runtime.attention.base import UnsupportedModelError
from server.engine.runtime.model.decoder import decoder_layers
from server.engine.runtime.preparation.assembly import build_runner
from tests.checkpoint.further_families import (
    FROM_16_BIT,
    NEEDS_IMAGES,
    SERVED,
    WHOLE_TOWERS,
    WRITTEN,
    WRONG_POSITIONS,
    settings_of,
    skip_unless_known,
)
from tests.checkpoint.layouts import (
    CONFIG,
    CPU,
    answers,
    auto_class,
    check_answers,
    config_of,
    random_model,
    reference_model,
    save_nf4,
    silent,
)
from tests.marks import with_rest

TOWERS = ["model.vision_tower", "model.vision_model", "model.mm_projector", "model.multi_modal_projector", "lm_head"]
QUICK = ("glm4_moe_lite", "hunyuan_v1_moe", "kosmos-2.5", "minimax_m2", "qwen2_5_omni_thinker", "roberta")
"""Those that `make test` runs: one of each kind that needed something of its own."""


def saved(family: str, folder: Path) -> Path:
    skip_unless_known(family)
    options: dict[str, Any] = {"llm_int8_skip_modules": TOWERS} if family in WHOLE_TOWERS else {}
    return save_nf4(random_model(config_of(family, **settings_of(family))), folder, **options)


@pytest.mark.parametrize("family", with_rest(SERVED, QUICK))
def test_families_in_nf4(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a server: with written layers, if the family has them; the log says in a line why it has none."""
    caplog.set_level(logging.INFO)
    folder = saved(family, tmp_path / "model")
    reference = reference_model(folder, tmp_path / "reference")
    config = CONFIG.model_copy(update={"enforce_eager": False})
    runner = build_runner(load_model(folder, CPU, torch.float32, silent), config)
    layers = decoder_layers(runner._paged.model)
    assert any("forward" in vars(layer) for layer in layers) == (family in WRITTEN)
    check_answers(reference, answers(runner, config))
    assert not [record for record in caplog.records if record.exc_info or record.levelno > logging.WARNING]


@pytest.mark.parametrize("family", WRONG_POSITIONS)
def test_decoders_whose_text_would_be_wrong(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path / "model")
    with pytest.raises(
        UnsupportedModelError, match=r"ForCausalLM cannot be served, .* its forward takes no position_ids"
    ):
        build_runner(load_model(tmp_path / "model", CPU, torch.float32, silent), CONFIG)


@pytest.mark.parametrize("family", NEEDS_IMAGES)
def test_classes_that_need_an_image(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=r"cannot be served: its forward fails on a prompt of text alone"):
        build_runner(load_model(tmp_path / "model", CPU, torch.float32, silent), CONFIG)


@pytest.mark.parametrize("family", FROM_16_BIT)
def test_classes_whose_nf4_transformers_cannot_read(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"splits or joins tensors .* the same model in 16 bit may work"):
        load_model(tmp_path / "model", CPU, torch.float32, silent)


@pytest.mark.parametrize("family", ["aria_text", "ernie4_5_vl_moe", "step3p7", *FROM_16_BIT])
def test_16_bit_checkpoints_whose_names_only_transformers_knows(family: str, tmp_path: Path) -> None:
    skip_unless_known(family)
    random_model(config_of(family, **settings_of(family))).to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(tmp_path, CPU, torch.float32, silent)
    own = auto_class(family).from_pretrained(tmp_path, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            weight = Weight.from_quant_state(module.weight, module.weight.quant_state)
            own.get_submodule(name).weight.data = dequantize(weight, torch.float32)
        elif isinstance(module, NF4Experts):
            experts = own.get_submodule(name)
            experts.gate_up_proj.data = dequantize(module.gate_up.weight, torch.float32)
            experts.down_proj.data = dequantize(module.down.weight, torch.float32)
    check_answers(own, answers(build_runner(model, CONFIG)))
