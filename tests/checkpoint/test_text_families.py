"""Every text family of docs/models.md from an NF4 checkpoint: served with transformers' tokens, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server.checkpoint.loading import load_model
from server.engine.runtime.attention.base import UnsupportedModelError
from server.engine.runtime.preparation.assembly import build_runner
from tests.checkpoint.families import COMMON, NEWER, REFUSED, SERVED, skip_where_refused
from tests.checkpoint.layouts import (
    CONFIG,
    CPU,
    change_tensors,
    check_served,
    config_of,
    random_model,
    save_nf4,
    silent,
)
from tests.marks import with_rest

QUICK = ("cohere", "gemma2", "gemma3n_text", "gpt_bigcode", "granite", "phi", "qwen3")
"""tests/engine/test_families.py has the attention of all families, without NF4."""


@pytest.mark.parametrize("family", with_rest(SERVED, QUICK))
def test_families_in_nf4(family: str, tmp_path: Path) -> None:
    skip_where_refused(family)
    check_served(save_nf4(random_model(config_of(family, **{**COMMON, **SERVED[family]})), tmp_path / "model"))


@pytest.mark.parametrize("family", REFUSED)
def test_families_whose_attention_is_another(family: str, tmp_path: Path) -> None:
    settings, reason = REFUSED[family]
    save_nf4(random_model(config_of(family, **{**COMMON, **settings})), tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=reason):
        build_runner(load_model(tmp_path / "model", CPU, torch.float32, silent), CONFIG)


@pytest.mark.parametrize("family", NEWER)
def test_an_older_transformers_is_told_which_one_serves_the_family(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_nf4(random_model(config_of(family, **{**COMMON, **SERVED[family]})), tmp_path / "model")
    model = load_model(tmp_path / "model", CPU, torch.float32, silent)
    if model._supports_attention_backend:
        # Before 5.24 it logs that the class has no such interface, and leaves the attention as it is.
        monkeypatch.setattr(type(model.get_decoder()), "set_attn_implementation", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"0 of 2 layers .*; it needs transformers 5\.24 or newer, "):
        build_runner(model, CONFIG)


@pytest.mark.parametrize(("family", "masks"), [("gptj", ("bias", "masked_bias")), ("codegen", ("causal_mask",))])
def test_masks_in_the_files_of_other_versions(family: str, masks: tuple[str, ...], tmp_path: Path) -> None:
    """GPT-J and CodeGen are published with their causal masks, as buffers of each layer."""
    skip_where_refused(family)
    folder = save_nf4(random_model(config_of(family, **{**COMMON, **SERVED[family]})), tmp_path / "model")
    causal = torch.ones(1, 1, 256, 256).tril().bool()
    buffers = {name: torch.tensor(-1e9) if name == "masked_bias" else causal for name in masks}
    extra = {f"transformer.h.{i}.attn.{name}": mask.clone() for i in range(2) for name, mask in buffers.items()}
    change_tensors(folder, lambda tensors: tensors | extra)
    check_served(folder)
