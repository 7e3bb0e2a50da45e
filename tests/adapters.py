"""QLoRA adapters with random weights, saved by PEFT itself, and what PEFT computes with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

ALL_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(model: PreTrainedModel, folder: Path, seed: int, size: float = 0.05, **options: Any) -> None:
    """Save an adapter of model into folder, with PEFT's options; model is left as it was.

    PEFT starts with B = 0, an adapter without effect: both factors get normal values of that size here. Whatever else is
    trained is moved by as much.
    """
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if not parameter.requires_grad:
                continue
            if "magnitude" in name:
                parameter.mul_(1 + torch.rand(parameter.shape, generator=generator).to(parameter.device))
            elif ".lora_" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.device) * size)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    adapted.save_pretrained(folder)
    adapted.unload()


def change_adapter(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Rewrite an adapter's weights."""
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


def with_adapter(model: PreTrainedModel, folder: Path) -> PeftModel:
    """The model as PEFT runs it with the adapter in folder."""
    return PeftModel.from_pretrained(model, folder).eval()
