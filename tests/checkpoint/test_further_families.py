"""Families that few people serve, from an NF4 checkpoint: served with transformers' tokens, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from server.checkpoint.loading import load_model
from server.engine.runtime.attention.base import UnsupportedModelError
from server.engine.runtime.preparation.assembly import build_runner
from tests.checkpoint.further_families import (
    MULTIMODAL,
    NEEDS_IMAGES,
    TEXT_FAMILIES,
    WRONG_POSITIONS,
    settings_of_decoder,
)
from tests.checkpoint.layouts import CONFIG, CPU, check_served, config_of, random_model, save_nf4, silent


@pytest.mark.parametrize("family", [*TEXT_FAMILIES, *MULTIMODAL])
def test_families_in_nf4(family: str, tmp_path: Path) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have {family}")
    config = config_of(family, **(TEXT_FAMILIES | MULTIMODAL)[family])
    check_served(save_nf4(random_model(config), tmp_path / "model"))


@pytest.mark.parametrize("family", WRONG_POSITIONS)
def test_decoders_whose_text_would_be_wrong(family: str, tmp_path: Path) -> None:
    save_nf4(random_model(config_of(family, **settings_of_decoder())), tmp_path / "model")
    with pytest.raises(
        UnsupportedModelError, match=r"ForCausalLM cannot be served, .* its forward takes no position_ids"
    ):
        build_runner(load_model(tmp_path / "model", CPU, torch.float32, silent), CONFIG)


@pytest.mark.parametrize("family", NEEDS_IMAGES)
def test_classes_that_need_an_image(family: str, tmp_path: Path) -> None:
    save_nf4(random_model(config_of(family, **NEEDS_IMAGES[family])), tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=r"cannot be served: its forward fails on a prompt of text alone"):
        build_runner(load_model(tmp_path / "model", CPU, torch.float32, silent), CONFIG)
