"""Models that keep other states than keys and values are refused by name, before their weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from server.checkpoint.base import CheckpointError
from server.checkpoint.loading import load_model
from tests.checkpoint.layouts import CPU, check_served, config_of, random_model, save_nf4, silent
from tests.checkpoint.test_layouts import LLAMA

HYBRIDS = {
    "qwen3_next": "Qwen3NextForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "jamba": "JambaForCausalLM",
    "bamba": "BambaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
}


def refused(folder: Path, model_type: str, architecture: str, **settings: Any) -> str:
    folder.mkdir(exist_ok=True)
    config = {"model_type": model_type, "architectures": [architecture], **settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(8)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, CPU, torch.float32, silent)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_hybrids_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    # Without its layers' kinds LFM2 is made of attention only.
    settings = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2} if model_type == "lfm2" else {}
    message = refused(tmp_path, model_type, HYBRIDS[model_type], **settings)
    assert f"{HYBRIDS[model_type]} ({model_type}) has layers" in message
    assert "of models with such layers, only Qwen3.5's dense ones are served" in message


@pytest.mark.parametrize(("model_type", "architecture"), [("vit", "ViTModel"), ("clip", "CLIPModel")])
def test_other_models_are_refused_by_name(model_type: str, architecture: str, tmp_path: Path) -> None:
    assert model_type in refused(tmp_path, model_type, architecture)


def test_granite_4_without_state_space_layers_is_served(tmp_path: Path) -> None:
    settings = {**LLAMA, "layer_types": ["attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 96}
    settings |= {"position_embedding_type": "rope"}
    check_served(save_nf4(random_model(config_of("granitemoehybrid", **settings)), tmp_path / "model"))
