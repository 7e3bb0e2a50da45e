"""Damaged checkpoints end the start on several ranks, too, with the tensor's name: on every rank that reads the tensor."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from server.checkpoint.sharding.sharded import load_shard
from server.checkpoint.sharding.shards import Shard
from tests.checkpoint.layouts import CPU, Tensors, change_tensors, config_of, random_model, refusal, save_nf4, silent
from tests.checkpoint.test_damage import DAMAGE, UP
from tests.checkpoint.test_layouts import LLAMA
from tests.moe_checkpoints import save_moe, tiny_moe

SIZES = {**LLAMA, "intermediate_size": 256, "hidden_size": 128}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole NF4 checkpoint."""
    return save_nf4(random_model(config_of("llama", **SIZES)), tmp_path_factory.mktemp("checkpoints") / "good")


def refused(folder: Path, rank: int = 0) -> str:
    return refusal(lambda: load_shard(folder, CPU, torch.float32, silent, Shard(rank, 2)), folder)


@pytest.mark.parametrize("change", DAMAGE)
def test_what_one_rank_refuses(good: Path, tmp_path: Path, change: Callable[[Tensors], object]) -> None:
    bad = shutil.copytree(good, tmp_path / "bad")
    change_tensors(bad, change)
    for rank in range(2):
        message = refused(bad, rank)
        names = (UP, "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj")
        assert any(name in message for name in names), message


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("nested", [False, True])
def test_scales_of_another_ranks_part(rank: int, nested: bool, tmp_path: Path) -> None:
    model = random_model(config_of("llama", **SIZES))
    folder = save_nf4(model, tmp_path / "model", bnb_4bit_use_double_quant=nested)
    scales = f"{UP}.nested_absmax" if nested else f"{UP}.absmax"
    change_tensors(folder, lambda tensors: tensors[scales][-1:].fill_(float("inf")))
    assert f"the scales (absmax) of {UP} are not finite" in refused(folder, rank)


def test_rows_of_the_vocabulary_are_those_of_the_rank_that_has_them(good: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(good, tmp_path / "bad")
    change_tensors(bad, lambda tensors: tensors["lm_head.weight"][100].fill_(float("nan")))
    load_shard(bad, CPU, torch.float32, silent, Shard(0, 2))
    assert "lm_head.weight has values that are not finite numbers" in refused(bad, 1)


def test_scales_of_experts(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
    save_moe(tmp_path, tiny_moe("qwen3_moe", **sizes), nested=False)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    change_tensors(tmp_path, lambda tensors: tensors[f"{name}.absmax"][:1].fill_(float("nan")))
    assert f"the scales (absmax) of {name} are not finite numbers" in refused(tmp_path, 1)
