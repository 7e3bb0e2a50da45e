"""Sums of experts' results over ranks: once behind a layer's, where the model adds its shared expert to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.experts.module import NF4Experts
from server.checkpoint.loading import load_model
from server.engine.runtime.model.exchanged_experts import ReducedBlock, ReducedExperts, exchange_experts
from server.engine.runtime.model.projections import replace_projections
from tests.moe_checkpoints import save_moe, separate_experts, tiny_moe


class Normed(nn.Module):
    """A block that normalizes the sum of experts and shared experts, which no sum of parts can be."""

    def __init__(self, block: nn.Module, hidden: int) -> None:
        super().__init__()
        self.experts, self.shared_experts, self.gate = block.experts, block.shared_experts, block.gate
        self.norm = nn.RMSNorm(hidden, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, weights, chosen = self.gate(x)
        routed: torch.Tensor = self.experts(x.view(-1, x.shape[-1]), chosen, weights)
        found: torch.Tensor = self.norm(routed.view(x.shape) + self.shared_experts(x))
        return found


def loaded(folder: Path, family: str) -> PreTrainedModel:
    options = {"rename": separate_experts} if family == "llama4_text" else {}
    save_moe(folder, tiny_moe(family), **options)
    model = load_model(folder, torch.device("cpu"), torch.bfloat16, lambda *_: None)
    # As before every exchange; bitsandbytes' own layers repack what they multiply on CPUs with AVX512-BF16.
    replace_projections(model)
    return model


@pytest.mark.parametrize(
    ("family", "layer", "block", "shared"),
    [
        ("glm4_moe", 1, "mlp", "shared_experts"),
        ("deepseek_v2", 1, "mlp", "shared_experts"),
        ("qwen2_moe", 0, "mlp", "shared_expert"),
        ("llama4_text", 1, "feed_forward", "shared_expert"),
    ],
)
def test_one_sum_behind_experts_and_shared_experts(
    family: str, layer: int, block: str, shared: str, tmp_path: Path
) -> None:
    model = loaded(tmp_path, family)
    name = f"model.layers.{layer}.{block}"
    partial = [f"{name}.{shared}.down_proj", f"model.layers.{layer}.self_attn.o_proj"]
    before = {key: module for key, module in model.named_modules() if key.startswith(name)}
    assert exchange_experts(model, partial) == {partial[0]}
    assert isinstance(model.get_submodule(name), ReducedBlock)
    for key, module in before.items():
        assert model.get_submodule(key.replace(name, f"{name}.block")) is module


def test_experts_alone_are_summed_behind_them(tmp_path: Path) -> None:
    model = loaded(tmp_path, "qwen3_moe")
    assert exchange_experts(model, ["model.layers.0.self_attn.o_proj"]) == set()
    assert all(isinstance(layer.mlp.experts, ReducedExperts) for layer in model.model.layers)


def test_a_block_that_does_more_than_add_is_summed_part_by_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = loaded(tmp_path, "glm4_moe")
    layer = model.model.layers[1]
    layer.mlp = Normed(layer.mlp, model.config.hidden_size)
    assert exchange_experts(model, ["model.layers.1.mlp.shared_experts.down_proj"]) == set()
    assert isinstance(layer.mlp, Normed)
    assert isinstance(layer.mlp.experts, ReducedExperts)
    assert isinstance(layer.mlp.experts.experts, NF4Experts)
    assert "Normed: its ranks exchange twice" in caplog.text
