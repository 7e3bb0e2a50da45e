"""Shards of checkpoints whose tensors have scale blocks of several sizes: they are divided by the largest, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import quantize_4bit

from server.checkpoint.base import CheckpointError
from server.checkpoint.classes import loading_of
from server.checkpoint.inspection import inspect_checkpoint
from server.checkpoint.sharding.plan import plan_shard
from server.checkpoint.sharding.sharded import load_shard
from server.checkpoint.sharding.shards import Shard
from server.checkpoint.sharding.stored import StoredTensors, blocksizes_of, largest_blocks
from tests.checkpoint.layouts import CPU, change_tensors, expanded, save_nf4, silent
from tests.checkpoint.sharding.test_sharded import compare_shards
from tests.engine.models import tiny_model

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "num_hidden_layers": 2, "vocab_size": 128,
}  # fmt: skip


def coarser(folder: Path, sizes: dict[str, int], nested: bool = True) -> Path:
    """Quantize some NF4 weights of a checkpoint again, in blocks of other sizes."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, weight in expanded({n: t for n, t in tensors.items() if n.startswith(tuple(sizes))}).items():
            for key in [key for key in tensors if key.startswith(f"{name}.")]:
                del tensors[key]
            packed, state = quantize_4bit(weight, blocksize=sizes[name], quant_type="nf4", compress_statistics=nested)
            tensors[name] = packed
            tensors |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        return tensors

    return change_tensors(folder, change)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_nf4(tiny_model("llama", **SIZES), tmp_path / "model")


DOWN, GATE = "model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.gate_proj.weight"


@pytest.mark.parametrize("nested", [False, True])
def test_sizes_are_those_of_the_quantization_states(folder: Path, nested: bool) -> None:
    coarser(folder, {DOWN: 256, GATE: 4096}, nested)
    info = inspect_checkpoint(folder)
    stored = StoredTensors(folder)
    states = {name: stored.quant_state(name) for name in info.packed}
    assert blocksizes_of(info) == {name: state.blocksize for name, state in states.items() if state is not None}
    assert set(blocksizes_of(info).values()) == {64, 256, 4096}


def test_parts_are_whole_blocks_of_all_sizes(folder: Path) -> None:
    attention = "model.layers.0.self_attn."
    coarser(folder, {DOWN: 128, GATE: 256, f"{attention}k_proj.weight": 128, f"{attention}o_proj.weight": 256})
    compare_shards(folder, 2)


def test_a_width_that_is_padded_to_whole_blocks_of_the_largest_size(tmp_path: Path) -> None:
    sizes = {**SIZES, "intermediate_size": 1152}
    folder = coarser(save_nf4(tiny_model("llama", **sizes), tmp_path / "model"), {DOWN: 128})
    # 9 blocks of 128: the second rank has 4, and one of zeros. Blocks of 64 would be 9 for each, the last of 128 divided.
    parts = plan_shard(folder, CPU, torch.float32, Shard(1, 2)).empty.parts
    assert parts[DOWN.removesuffix(".weight")].shape == (256, 640)
    compare_shards(folder, 2)


def test_the_error_names_the_tensor_whose_blocks_do_not_divide(folder: Path) -> None:
    coarser(folder, {DOWN: 1024})
    reason = r"1024 features of the MLP in blocks of 1024, as model\.layers\.1\.mlp\.down_proj\.weight has them"
    with pytest.raises(CheckpointError, match=reason):
        plan_shard(folder, CPU, torch.float32, Shard(0, 2))


def test_blocks_of_what_is_not_divided_do_not_count(folder: Path) -> None:
    head = "lm_head.weight"
    stored = {}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        packed, state = quantize_4bit(tensors[head].float(), blocksize=4096, quant_type="nf4")
        stored.update({head: packed, **{f"{head}.{k}": value for k, value in state.as_dict(packed=True).items()}})
        tensors |= stored

    change_tensors(folder, change)
    info = inspect_checkpoint(folder)
    assert blocksizes_of(info)[head] == 4096
    assert largest_blocks(info, loading_of(info).config) == (64, None)
    rows = load_shard(folder, CPU, torch.float32, silent, Shard(1, 2)).model.lm_head.weight
    assert torch.allclose(rows, expanded(stored)[head][64:], atol=1e-6)
