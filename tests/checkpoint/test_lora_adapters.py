"""LoRA adapters in PEFT's format: what is no plain LoRA of projections, or damaged, is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from server.checkpoint.base import CheckpointError
from server.checkpoint.lora import read_adapter
from tests.adapters import save_adapter
from tests.checkpoint.layouts import change_tensors, without
from tests.engine.models import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 4 that can be read."""
    folder = tmp_path_factory.mktemp("adapters") / "good"
    save_adapter(tiny_model("llama"), folder, 0, 0.3, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    assert len(read_adapter(folder, torch.float32)) == 6
    return folder


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"modules_to_save": ["norm"]}, "a whole norm (modules_to_save) is not served"),
        ({"trainable_token_indices": ["x"]}, "trainable_token_indices must be numbers of tokens"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "adapted parameters (target_parameters) is not served"),
        ({"peft_type": "IA3"}, "only LORA is served"),
        ({"use_dora": True}, "has no lora_magnitude_vector"),
        ({"task_type": "SEQ_CLS"}, "only CAUSAL_LM is served"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base's weights"),
        ({"lora_alpha": None}, "lora_alpha and alpha_pattern must be numbers"),
        ({"lora_alpha": float("nan")}, "lora_alpha and alpha_pattern must be numbers"),
    ],
)
def test_configurations_that_are_not_plain_lora_are_refused_by_name(
    folder: Path, tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    bad = shutil.copytree(folder, tmp_path / "bad")
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        read_adapter(tmp_path / "bad", torch.float32)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.update({FIRST: torch.ones(3, 64)}), "do not fit together"),
        (lambda t: t.update({FIRST: torch.full((4, 64), float("inf"))}), "not finite"),
        (without(FIRST), "has only one of lora_A and lora_B"),
        (lambda t: t.update({FIRST.replace("layers.0", "layers.9"): torch.ones(4, 64)}), "has only one of"),
        (lambda t: t.update({"base_model.model.other": torch.ones(1)}), "not a LoRA weight: base_model.model.other"),
        (lambda t: t.clear(), "has no LoRA weights"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], complaint: str
) -> None:
    change_tensors(shutil.copytree(folder, tmp_path / "bad"), change, "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        read_adapter(tmp_path / "bad", torch.float32)


def test_a_damaged_file_is_refused(folder: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(folder, tmp_path / "bad")
    weights = bad / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="damaged"):
        read_adapter(bad, torch.float32)
