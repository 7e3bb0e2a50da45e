"""Every text family of docs/models.md from an NF4 checkpoint: served with transformers' tokens, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server.checkpoint.loading import load_model
from server.engine.runtime.attention.base import UnsupportedModelError
from server.engine.runtime.preparation.assembly import build_runner
from tests.checkpoint.families import COMMON, REFUSED, SERVED
from tests.checkpoint.layouts import CONFIG, CPU, check_served, config_of, random_model, save_nf4, silent


@pytest.mark.parametrize("family", SERVED)
def test_families_in_nf4(family: str, tmp_path: Path) -> None:
    check_served(save_nf4(random_model(config_of(family, **{**COMMON, **SERVED[family]})), tmp_path / "model"))


@pytest.mark.parametrize("family", REFUSED)
def test_families_whose_attention_is_another(family: str, tmp_path: Path) -> None:
    settings, reason = REFUSED[family]
    save_nf4(random_model(config_of(family, **{**COMMON, **settings})), tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=reason):
        build_runner(load_model(tmp_path / "model", CPU, torch.float32, silent), CONFIG)
