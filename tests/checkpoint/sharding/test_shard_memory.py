"""Count of a shard's bytes before it is loaded: zeros behind widths and expanded scales of experts, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from server.checkpoint.base import CheckpointError
from server.checkpoint.sharding import sharded
from server.checkpoint.sharding.plan import plan_shard
from server.checkpoint.sharding.sharded import load_shard
from server.checkpoint.sharding.shards import Shard
from server.engine.runtime.model.projections import replace_projections
from tests.checkpoint.layouts import CPU, save_nf4, silent
from tests.engine.models import tiny_model
from tests.moe_checkpoints import nowhere, save_moe, tiny_moe, unsloth_gpt_oss

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 1024, "moe_intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
# 9 scale blocks, so that each of two ranks has 5.
PADDED = {"intermediate_size": 576, "moe_intermediate_size": 576}


def counted_and_held(folder: Path, count: int) -> list[tuple[int, int]]:
    """Of each rank the bytes that are counted, and those that it has."""
    found = []
    for rank in range(count):
        model = load_shard(folder, CPU, torch.float32, silent, Shard(rank, count)).model
        replace_projections(model)
        held = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        found.append((plan_shard(folder, CPU, torch.float32, Shard(rank, count)).num_bytes, sum(held.values())))
    return found


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("qwen3_moe", {}, {}),
        ("qwen3_moe", {}, {"stacked": True}),
        ("qwen3_moe", PADDED, {}),
        ("glm4_moe", {**PADDED, "n_shared_experts": 2}, {}),
        ("mixtral", PADDED, {"in_nf4": nowhere}),
        ("gpt_oss", PADDED, {"rename": unsloth_gpt_oss}),
    ],
)
def test_experts_with_their_zeros_and_plain_scales(
    family: str, sizes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    save_moe(tmp_path, tiny_moe(family, **{**SIZES, **sizes}), **options)
    for counted, held in counted_and_held(tmp_path, 2):
        assert counted == pytest.approx(held, rel=0.01)


def test_dense_models_whose_key_heads_several_ranks_have(tmp_path: Path) -> None:
    # Parts of whole groups of 256 scale blocks, which stay nested where they are joined.
    sizes = {"hidden_size": 256, "intermediate_size": 1088, "num_attention_heads": 8, "head_dim": 128}
    sizes |= {"num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 200}
    folder = save_nf4(tiny_model("llama", **sizes), tmp_path / "model")
    for counted, held in counted_and_held(folder, 2):
        assert counted == pytest.approx(held, rel=0.01)


def test_a_shard_that_does_not_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_moe(tmp_path, tiny_moe("qwen3_moe", **SIZES))
    needed = plan_shard(tmp_path, CPU, torch.float32, Shard(1, 2)).num_bytes
    monkeypatch.setattr("server.checkpoint.loading.available_bytes", lambda device: needed)
    load_shard(tmp_path, CPU, torch.float32, silent, Shard(1, 2))
    monkeypatch.setattr("server.checkpoint.loading.available_bytes", lambda device: needed - 1)
    monkeypatch.setattr(sharded, "StoredTensors", None)
    with pytest.raises(CheckpointError, match=r"too large: its weights take 0\.0 GiB in NF4 on each of 2 devices"):
        load_shard(tmp_path, CPU, torch.float32, silent, Shard(1, 2))
