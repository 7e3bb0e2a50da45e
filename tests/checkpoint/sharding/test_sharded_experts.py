"""Parts of experts: the stored weights' own codes and scales in every layout, and what cannot be divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from nf4_kernels import cpu
from nf4_kernels.reference import dequantize
from server.checkpoint.base import CheckpointError
from server.checkpoint.dummy import dummy_shard
from server.checkpoint.experts.module import NF4Experts
from server.checkpoint.loading import load_model
from server.checkpoint.sharding.experts import ExpertsPart
from server.checkpoint.sharding.experts import experts_of as experts_of_shard
from server.checkpoint.sharding.sharded import load_shard
from server.checkpoint.sharding.shards import Shard, check_count, possible_counts
from server.checkpoint.sharding.widths import part_of_width, range_of
from server.engine.runtime.model.projections import replace_projections
from tests.checkpoint.layouts import CPU, silent
from tests.checkpoint.test_experts import experts_of
from tests.marks import with_rest
from tests.moe_checkpoints import is_projection, nowhere, save_moe, tiny_moe, unsloth_gpt_oss
from tests.nf4_kernels.weights import quantized

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 512, "moe_intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
PADDED = {"intermediate_size": 576, "moe_intermediate_size": 576}


def shard_of(folder: Path, rank: int, count: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return load_shard(folder, CPU, dtype, silent, Shard(rank, count)).model


def compare(own: NF4Experts, whole: NF4Experts, rank: int, each: int) -> None:
    """The rank's part has the whole weight's values and biases, and zeros behind them."""
    inner = whole.down.shape[2]
    part = range_of(inner, each, rank)
    gates_ups = dequantize(whole.gate_up.weight, torch.float32).unflatten(1, (2, inner))
    found = dequantize(own.gate_up.weight, torch.float32).unflatten(1, (2, each))
    assert torch.equal(found[:, :, : len(part)], gates_ups[:, :, part.start : part.stop])
    assert not found[:, :, len(part) :].any()
    down = dequantize(whole.down.weight, torch.float32)
    found = dequantize(own.down.weight, torch.float32)
    assert torch.equal(found[..., : len(part)], down[..., part.start : part.stop])
    assert not found[..., len(part) :].any()
    # The kernels take what the oracle takes.
    one = own.gate_up.weight.expert(1)
    assert torch.equal(cpu.dequantize(one, torch.float32), dequantize(one, torch.float32))
    if whole.gate_up.bias is None:
        assert own.gate_up.bias is None
        assert own.down.bias is None
        return
    biases, own_biases = whole.gate_up.bias.unflatten(1, (2, inner)), own.gate_up.bias.unflatten(1, (2, each))
    assert torch.equal(own_biases[:, :, : len(part)], biases[:, :, part.start : part.stop])
    assert not own_biases[:, :, len(part) :].any()
    assert (own.down.bias is None) == (rank > 0)
    assert rank or torch.equal(own.down.bias, whole.down.bias)


@pytest.mark.parametrize(
    ("family", "options", "nested"),
    with_rest(
        [
            ("qwen3_moe", {}, {2: True, 4: True, 8: False}),
            ("qwen3_moe", {"stacked": True}, {2: True, 8: False}),
            ("qwen3_moe", {"nested": False}, {2: False}),
            ("granitemoe", {}, {4: True}),
            ("mixtral", {"in_nf4": nowhere}, {2: True}),
            # Rows that take turns are put in order, which makes scales plain.
            ("gpt_oss", {"rename": unsloth_gpt_oss}, {2: False}),
            ("gpt_oss", {"in_nf4": nowhere}, {2: True}),
        ],
        lambda case: case[2] in ({2: True}, {2: False}, {4: True}),
    ),
)
def test_parts_have_the_whole_weights_bits(
    family: str, options: dict[str, Any], nested: dict[int, bool], tmp_path: Path
) -> None:
    save_moe(tmp_path, tiny_moe(family, **SIZES), **options)
    whole = experts_of(load_model(tmp_path, CPU, torch.float32, silent))
    for count, stays in nested.items():
        for rank in range(count):
            parts = experts_of(shard_of(tmp_path, rank, count))
            for own, theirs in zip(parts, whole, strict=True):
                compare(own, theirs, rank, 512 // count)
                assert (own.gate_up.absmax_8bit is not None) == stays
                assert own.down.absmax_8bit is None


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3_moe", {}), ("granitemoe", {}), ("gpt_oss", {"rename": unsloth_gpt_oss}), ("mixtral", {"in_nf4": nowhere})],
)
@pytest.mark.parametrize(("inner", "count"), [(576, 2), pytest.param(960, 8, marks=pytest.mark.slow)])
def test_widths_that_do_not_divide_have_zeros_behind_them(
    family: str, options: dict[str, Any], inner: int, count: int, tmp_path: Path
) -> None:
    sizes = {**SIZES, "intermediate_size": inner, "moe_intermediate_size": inner}
    save_moe(tmp_path, tiny_moe(family, **sizes), **options)
    whole = experts_of(load_model(tmp_path, CPU, torch.float32, silent))[0]
    kinds = set()
    for rank in range(count):
        own = experts_of(shard_of(tmp_path, rank, count))[0]
        compare(own, whole, rank, own.down.shape[2])
        kinds.add((own.gate_up.absmax_8bit is not None, own.gate_up.absmax.shape, own.down.absmax.shape))
    # One compiled function serves all ranks.
    assert len(kinds) == 1


def test_shared_experts_and_dense_layers_have_zeros_behind_them(tmp_path: Path) -> None:
    save_moe(tmp_path, tiny_moe("glm4_moe", **{**SIZES, **PADDED}, n_shared_experts=2))
    whole = load_model(tmp_path, CPU, torch.float32, silent)
    replace_projections(whole)
    for rank in range(2):
        sharded = load_shard(tmp_path, CPU, torch.float32, silent, Shard(rank, 2))
        replace_projections(sharded.model)
        for name, width in (("layers.0.mlp", 576), ("layers.1.mlp.shared_experts", 1152)):
            mlp, theirs = (model.model.get_submodule(name) for model in (sharded.model, whole))
            x = torch.randn(3, 128)
            part = sharded.parts[f"model.{name}.down_proj"]
            assert part.padding == rank * (2 * part.shape[1] - width)
            kept = slice(part.columns.start, part.columns.stop)
            inner = torch.nn.functional.silu(theirs.gate_proj(x)) * theirs.up_proj(x)
            expected = torch.zeros_like(inner)
            expected[:, kept] = inner[:, kept]
            torch.testing.assert_close(mlp(x), theirs.down_proj(expected), atol=1e-3, rtol=1e-3)


def test_corrections_of_scores_stay_float32(tmp_path: Path) -> None:
    save_moe(tmp_path, tiny_moe("glm4_moe", **SIZES))
    model = shard_of(tmp_path, 1, 2, torch.bfloat16)
    whole = load_model(tmp_path, CPU, torch.bfloat16, silent)
    own, theirs = (m.model.layers[1].mlp.gate.e_score_correction_bias for m in (model, whole))
    assert own.dtype == theirs.dtype == torch.float32
    assert torch.equal(own, theirs)


def test_random_shards_have_the_geometry_of_real_ones(tmp_path: Path) -> None:
    save_moe(tmp_path, tiny_moe("gpt_oss", **SIZES), in_nf4=nowhere)
    for rank in range(2):
        real = experts_of(shard_of(tmp_path, rank, 2))[0]
        made = experts_of(dummy_shard(tmp_path, CPU, torch.float32, silent, Shard(rank, 2)).model)[0]
        assert {name: buffer.shape for name, buffer in made.named_buffers() if "offset" not in name} == {
            name: buffer.shape for name, buffer in real.named_buffers() if "offset" not in name
        }


def test_experts_in_16_bit_beside_nf4_are_refused_by_name(tmp_path: Path) -> None:
    save_moe(tmp_path, tiny_moe("qwen3_moe", **SIZES), in_nf4=lambda name: "self_attn" in name and is_projection(name))
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.experts: experts in 16 bit beside layers in NF4 cannot"
    ):
        shard_of(tmp_path, 0, 2)


def test_experts_of_an_unknown_kind_are_refused_by_name(tmp_path: Path) -> None:
    save_moe(tmp_path, tiny_moe("qwen3_moe", **SIZES, hidden_act="relu"), in_nf4=nowhere)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts: Qwen3MoeExperts cannot be divided"):
        shard_of(tmp_path, 0, 2)


def test_experts_in_modules_of_their_own_are_refused_by_name() -> None:
    with torch.device("meta"):
        whole, own = (tiny_moe("qwen3_moe", **{**SIZES, "moe_intermediate_size": inner}) for inner in (512, 256))
    for model in (whole, own):
        block = model.model.layers[1].mlp
        block.experts = torch.nn.ModuleList([torch.nn.ModuleDict({"up_proj": torch.nn.Linear(8, 8)})])
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.0\.up_proj: experts in modules of their own"):
        experts_of_shard(whole, own, Shard(0, 2), "folder")


def test_scale_blocks_are_never_divided() -> None:
    weight = quantized((128, 512), 128, True, seed=0).weight
    part = ExpertsPart(512, 64, 1)
    with pytest.raises(ValueError, match="64 of its 512 columns are not whole scale blocks of 128"):
        part.weight(weight, "down", False)
    narrow = quantized((512, 1), 64, False, seed=0).weight
    with pytest.raises(ValueError, match="rows 32 to 64 of 1 are not whole scale blocks of 64"):
        ExpertsPart(512, 32, 1).weight(narrow, "gate", False)


def test_sizes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", num_attention_heads=32, num_key_value_heads=4, head_dim=128, hidden_size=2048,
        moe_intermediate_size=768, intermediate_size=6144, num_hidden_layers=48,
    )  # fmt: skip
    message = (
        "tensor_parallel_size 8 does not divide the model: it has 32 heads, 4 KV heads and 768 or 6144 features of its"
        " MLPs in blocks of 64; possible: 1, 2, 4$"
    )
    with pytest.raises(CheckpointError, match=message):
        check_count(config, 64, 8, "folder")


@pytest.mark.parametrize(
    ("model_type", "heads", "widths", "possible"),
    [
        # Mixtral-8x22B, GLM-4.5-Air, gpt-oss-20b, DeepSeek-V3, Qwen1.5-MoE-A2.7B
        ("mixtral", (48, 8, None), {"intermediate_size": 16384}, [1, 2, 4, 8, 16]),
        ("glm4_moe", (96, 8, 128), {"intermediate_size": 10944, "moe_intermediate_size": 1408}, [1, 2, 4, 8]),
        ("gpt_oss", (64, 8, 64), {"intermediate_size": 2880}, [1, 2, 4, 8, 16]),
        (
            "deepseek_v3",
            (128, 128, None),
            {"intermediate_size": 18432, "moe_intermediate_size": 2048},
            [1, 2, 4, 8, 16, 32],
        ),
        (
            "qwen2_moe",
            (16, 16, None),
            {"intermediate_size": 5632, "shared_expert_intermediate_size": 5632, "moe_intermediate_size": 1408},
            [1, 2, 4, 8],
        ),
    ],
)
def test_possible_sizes_of_real_models(
    model_type: str, heads: tuple[int, int, int | None], widths: dict[str, int], possible: list[int]
) -> None:
    query, key, dim = heads
    sizes = {"num_attention_heads": query, "num_key_value_heads": key, **({"head_dim": dim} if dim else {}), **widths}
    config = AutoConfig.for_model(model_type, hidden_size=query * 128, **sizes)
    powers = [count for count in possible_counts(config, 64) if count.bit_count() == 1]
    assert powers == possible


def test_a_width_grows_by_an_eighth_at_most() -> None:
    assert part_of_width(2880, 2, 64) == 23 * 64
    assert part_of_width(768, 8, 64) is None
    assert part_of_width(2880, 2, 128) is None
    assert [len(range_of(2880, 6 * 64, rank)) for rank in range(8)] == [384] * 7 + [192]
