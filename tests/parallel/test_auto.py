"""engine.tensor_parallel_size auto: the fewest GPUs that hold the model and can be, else one, else the reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from server.checkpoint.base import CheckpointError
from server.checkpoint.inspection import inspect_checkpoint
from server.checkpoint.sharding.plan import plan_shard
from server.checkpoint.sharding.shards import Shard
from server.config import EngineConfig, LoraModule
from server.engine.parallel.auto import AUTO_SHARE, fewest
from tests.adapters import save_adapter
from tests.checkpoint.layouts import CPU, save_nf4
from tests.engine.models import tiny_model
from tests.moe_checkpoints import is_projection, save_moe, tiny_moe

AUTO = EngineConfig(device="cpu", tensor_parallel_size="auto")
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 512, "moe_intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip


def chosen(folder: Path, free: float, devices: int = 8, **settings: Any) -> int:
    config = AUTO.model_copy(update=settings)
    return fewest(folder, config, CPU, torch.float32, int(free), devices)


def free_for(folder: Path, count: int) -> float:
    """Free bytes of each GPU with which just that many hold a model with room for a cache."""
    return plan_shard(folder, CPU, torch.float32, Shard(0, count)).num_bytes / AUTO_SHARE + 1


def needs(folder: Path) -> int:
    return inspect_checkpoint(folder).loaded_bytes(4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    save_moe(folder, tiny_moe("qwen3_moe", **SIZES))
    return folder


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture with experts in 16 bit beside layers in NF4, which is served by one GPU only."""
    folder = tmp_path_factory.mktemp("refused")
    save_moe(folder, tiny_moe("qwen3_moe", **SIZES), in_nf4=lambda name: "self_attn" in name and is_projection(name))
    return folder


def test_the_fewest_that_hold_the_model(mixture: Path) -> None:
    assert chosen(mixture, needs(mixture) / AUTO_SHARE + 1) == 1
    assert chosen(mixture, needs(mixture) / AUTO_SHARE - 1) == 2
    # A rank has more than an equal part: what every rank has whole, and experts' plain scales.
    assert free_for(mixture, 2) > 1.02 * needs(mixture) / 2 / AUTO_SHARE
    for count in (2, 4):
        assert chosen(mixture, free_for(mixture, count)) == count
        assert chosen(mixture, free_for(mixture, count) - 2) > count


def test_the_largest_where_no_number_holds_it(mixture: Path) -> None:
    assert chosen(mixture, 1000, devices=5) == 4


def test_one_where_several_refuse_it_and_one_holds_it(refused: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(refused, needs(refused) + 1) == 1
    assert "one GPU, which leaves little for the KV cache: model.layers.0.mlp.experts: experts in 16 bit" in caplog.text


def test_an_error_with_the_reason_where_several_refuse_it_and_one_is_too_small(refused: Path) -> None:
    message = (
        r"engine\.tensor_parallel_size auto: its weights take 0\.0 GiB in NF4, 0\.0 GiB are free on cpu, and several GPUs"
        r" cannot have them: model\.layers\.0\.mlp\.experts: experts in 16 bit beside layers in NF4 cannot be divided"
    )
    with pytest.raises(CheckpointError, match=message):
        chosen(refused, needs(refused) - 1)
    # Where there is one GPU only, loading says what is missing.
    assert chosen(refused, needs(refused) - 1, devices=1) == 1


def test_sizes_that_the_model_does_not_have(embedded_folder: Path) -> None:
    free = needs(embedded_folder) - 1
    assert chosen(embedded_folder, free, devices=4) == 3
    with pytest.raises(
        CheckpointError, match=r"cannot have them: .* 2 does not divide the model: .* possible: 1, 3, 9$"
    ):
        chosen(embedded_folder, free, devices=2)


def test_what_the_configuration_wants_of_one_gpu(mixture: Path) -> None:
    assert chosen(mixture, needs(mixture) + 1, batch_invariant=True) == 1
    with pytest.raises(CheckpointError, match=r"cannot have them: engine\.batch_invariant does not work with"):
        chosen(mixture, needs(mixture) - 1, batch_invariant=True)


def test_an_adapter_that_one_gpu_serves_only(tmp_path: Path) -> None:
    model = tiny_model("llama", **{**SIZES, "num_hidden_layers": 1})
    folder = save_nf4(model, tmp_path / "model")
    for name, kind in (("plain", False), ("dora", True)):
        save_adapter(model.float(), tmp_path / name, 0, r=4, use_dora=kind, target_modules=["v_proj"])
        adapters = (LoraModule(name=name, path=tmp_path / name),)
        assert chosen(folder, needs(folder) + 1, lora_modules=adapters) == (1 if kind else 2)
    with pytest.raises(CheckpointError, match="cannot have them: adapter 'dora': DoRA, trained biases,"):
        chosen(folder, needs(folder) - 1, lora_modules=adapters)


def test_every_gpu_holds_the_draft_model_whole(mixture: Path, embedded_folder: Path) -> None:
    draft = {"speculation": "draft", "draft_model": str(embedded_folder)}
    free = needs(mixture) / AUTO_SHARE + 1
    assert chosen(mixture, free + needs(embedded_folder), **draft) == 1
    assert chosen(mixture, free + needs(embedded_folder) - 2, **draft) == 2
