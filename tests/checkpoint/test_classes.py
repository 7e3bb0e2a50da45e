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
from tests.checkpoint.further_families import skip_unless_known
from tests.checkpoint.layouts import CPU, check_served, config_of, random_model, refusal, save_nf4, silent
from tests.checkpoint.test_layouts import LLAMA

HYBRIDS = {
    "axk2": "AXK2ForCausalLM",
    "bailing_hybrid": "BailingHybridForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "dots3_note": "Dots3NoteForConditionalGeneration",
    "dots3_note_text": "Dots3NoteForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "hy_v4": "HYV4ForCausalLM",
    "hy_v4_vl": "HYV4VLForConditionalGeneration",
    "inkling2": "Inkling2ForConditionalGeneration",
    "inkling2_loop": "Inkling2LoopForConditionalGeneration",
    "inkling2_loop_text": "Inkling2LoopForCausalLM",
    "inkling2_text": "Inkling2ForCausalLM",
    "inkling_mm_model": "InklingForConditionalGeneration",
    "inkling_text": "InklingForCausalLM",
    "jamba": "JambaForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "lara_mini": "LaraMiniForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "lfm3_vl": "Lfm3VlForConditionalGeneration",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "minicpm_ocr": "MiniCPMOcrForConditionalGeneration",
    "minicpmv4_6": "MiniCPMV4_6ForConditionalGeneration",
    "minicpmv4_7": "MiniCPMV4_7ForConditionalGeneration",
    "minimax": "MiniMaxForCausalLM",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
    "nemotron_h_omni": "NemotronH_Omni_Reasoning_V3",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "qwen4_exp": "Qwen4ExpForConditionalGeneration",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "rwkv": "RwkvForCausalLM",
    "unlimited_ocr": "UnlimitedOcrForConditionalGeneration",
    "xlstm": "xLSTMForCausalLM",
    "zamba": "ZambaForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "zaya": "ZayaForCausalLM",
}
"""Types that have layers with states of other kinds, or attention over keys that it chooses or compresses; refused."""


def refused(folder: Path, model_type: str, architecture: str, **settings: Any) -> str:
    folder.mkdir(exist_ok=True)
    config = {"model_type": model_type, "architectures": [architecture], **settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(8)}, folder / "model.safetensors")
    return refusal(lambda: load_model(folder, CPU, torch.float32, silent), folder)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_hybrids_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    skip_unless_known(model_type)
    message = refused(tmp_path, model_type, HYBRIDS[model_type])
    assert f"{HYBRIDS[model_type]} ({model_type}) has layers" in message
    assert "docs/models.md says which models with such layers are served" in message


@pytest.mark.parametrize(("model_type", "architecture"), [("vit", "ViTModel"), ("clip", "CLIPModel")])
def test_other_models_are_refused_by_name(model_type: str, architecture: str, tmp_path: Path) -> None:
    assert model_type in refused(tmp_path, model_type, architecture)


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("llama", "LlamaForSequenceClassification", "generates no text"),
        ("qwen2", "Qwen2ForTokenClassification", "generates no text"),
        ("diffusion_gemma", "DiffusionGemmaForBlockDiffusion", "generates no text"),
        ("gemma4_assistant", "Gemma4AssistantForCausalLM", "proposes tokens for a larger model"),
    ],
)
def test_classes_that_are_no_language_models(model_type: str, architecture: str, reason: str, tmp_path: Path) -> None:
    skip_unless_known(model_type)
    message = refused(tmp_path, model_type, architecture)
    assert architecture in message
    assert reason in message


def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "configuration_new.NewConfig"}
    assert "code that comes with a checkpoint" in refused(tmp_path, "new_type", "NewForCausalLM", auto_map=auto_map)


def test_a_makers_own_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"params\.json, no config\.json"):
        load_model(tmp_path, CPU, torch.float32, silent)


def test_granite_4_without_state_space_layers_is_served(tmp_path: Path) -> None:
    settings = {**LLAMA, "layer_types": ["attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 96}
    settings |= {"position_embedding_type": "rope"}
    check_served(save_nf4(random_model(config_of("granitemoehybrid", **settings)), tmp_path / "model"))
