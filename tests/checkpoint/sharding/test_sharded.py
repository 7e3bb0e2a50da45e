"""Shards of checkpoints: the stored weights' own codes and scales, and what cannot be divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
)

from nf4_kernels import Weight, cpu, cuda, reference
from server.checkpoint.base import CheckpointError
from server.checkpoint.dummy import dummy_shard
from server.checkpoint.loading import load_model
from server.checkpoint.sharding.heads import norms_of, sinks_of
from server.checkpoint.sharding.sharded import load_shard
from server.checkpoint.sharding.shards import Part, Shard, check_count, parts_of, possible_counts, shard_config
from server.checkpoint.sharding.slices import cut_linear
from server.engine.runtime.model.projections import NF4Linear
from tests.checkpoint.layouts import CPU, change_json, change_tensors, save_nf4, silent
from tests.engine.models import tiny_model
from tests.nf4_kernels.cuda.cuda_weights import gpu
from tests.nf4_kernels.weights import quantized

SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 1,
}


def _dequantized(layer: Any) -> torch.Tensor:
    """The layer's weight, by the kernels and by the oracle."""
    weight = Weight.from_quant_state(layer.weight, layer.weight.quant_state)
    offset, skip = getattr(layer, "group_offset", 0), getattr(layer, "group_skip", 0)
    weight = replace(weight, group_offset=offset, group_skip=skip)
    found = reference.dequantize(weight, torch.float32)
    assert torch.equal(cpu.dequantize(weight, torch.float32), found)
    return found


def compare_shards(folder: Path, count: int) -> set[tuple[bool, bool]]:
    """Compare all shards with the whole model; which geometries of nested scales there were."""
    whole = dict(load_model(folder, CPU, torch.float32, silent).named_modules())
    seen = set()
    for rank in range(count):
        sharded = load_shard(folder, CPU, torch.float32, silent, Shard(rank, count))
        for name, module in sharded.model.named_modules():
            part = sharded.parts.get(name)
            if part is not None:
                assert isinstance(module, Linear4bit)
                full = _dequantized(whole[name])
                assert torch.equal(_dequantized(module), part.columns_of(part.rows_of(full))), name
                seen.add((module.group_offset > 0, module.group_skip > 0))
                continue
            for key, own in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                theirs = getattr(whole[name], key)
                if own.shape == theirs.shape and name not in ("lm_head", "model.embed_tokens"):
                    assert torch.equal(own, theirs), name
                else:
                    first = rank * own.shape[0]
                    held = theirs[first : first + own.shape[0]]
                    assert torch.equal(own[: len(held)], held)
                    assert not own[len(held) :].any()
    return seen


@pytest.mark.rest
def test_the_embedded_model_in_three_shards(embedded_folder: Path) -> None:
    # Rows of k are not whole groups of 256 scale blocks, so that parts of n begin inside groups, and parts of k skip some.
    assert compare_shards(embedded_folder, 3) == {(False, False), (True, False), (False, True), (True, True)}


@pytest.mark.parametrize("nested", [False, True])
def test_checkpoints_with_plain_and_nested_scales(tmp_path: Path, nested: bool) -> None:
    tiny_model("llama", **SIZES).save_pretrained(tmp_path / "wide")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested, bnb_4bit_compute_dtype="float32"
    )
    model = LlamaForCausalLM.from_pretrained(tmp_path / "wide", quantization_config=quantization, dtype=torch.float32)
    model.save_pretrained(tmp_path / "nf4")
    seen = compare_shards(tmp_path / "nf4", 2)
    assert seen == ({(False, False)} if not nested else seen)
    assert nested == ((True, True) in seen)


def test_layers_that_were_left_in_16_bit_are_split_too(tmp_path: Path) -> None:
    whole = tiny_model("llama", **SIZES)
    whole.save_pretrained(tmp_path / "wide")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["down_proj", "q_proj", "lm_head"]
    )
    model = LlamaForCausalLM.from_pretrained(tmp_path / "wide", quantization_config=quantization, dtype=torch.float32)
    model.save_pretrained(tmp_path / "nf4")
    shard = load_shard(tmp_path / "nf4", CPU, torch.float32, silent, Shard(1, 2)).model.model.layers[0]
    layer = whole.model.layers[0]
    assert torch.equal(shard.mlp.down_proj.weight, layer.mlp.down_proj.weight[:, 384:])
    assert torch.equal(shard.self_attn.q_proj.weight, layer.self_attn.q_proj.weight[192:])


def test_what_does_not_divide_is_refused_with_what_does(embedded_folder: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"tensor_parallel_size 2 does not divide the model: .* possible: 1, 3, 9$"
    ):
        load_shard(embedded_folder, CPU, torch.float32, silent, Shard(0, 2))


def test_models_of_several_parts_are_divided_like_their_text() -> None:
    assert possible_counts(Gemma3Config(), 64) == possible_counts(Gemma3Config().text_config, 64) == [1, 2, 4, 8]
    assert possible_counts(Gemma4Config(), 64) == possible_counts(Gemma4Config().text_config, 64) != [1]


def test_possible_counts() -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    assert possible_counts(LlamaConfig(**sizes, num_key_value_heads=2), 64) == [1, 2, 4, 8]
    assert possible_counts(LlamaConfig(**sizes, num_key_value_heads=2), 512) == [1]
    # The rows of o are whole blocks of 128 with two heads or more.
    assert possible_counts(LlamaConfig(**sizes, num_key_value_heads=4), 128) == [1, 2, 4]
    assert possible_counts(Gemma3TextConfig(**sizes, num_key_value_heads=1, head_dim=256), 64) == [1, 2, 4, 8]


def test_norms_over_all_heads_are_divided_where_they_are_root_mean_squares() -> None:
    config = Olmo2Config(**SIZES, vocab_size=64)
    with torch.device("meta"):
        whole, own = (AutoModelForCausalLM.from_config(c) for c in (config, shard_config(config, 2)))
    attention = "model.layers.0.self_attn"
    found = norms_of(whole, own, Shard(1, 2), "folder")
    assert found == {f"{attention}.q_norm": f"{attention}.q_proj", f"{attention}.k_norm": f"{attention}.k_proj"}
    del whole.get_submodule(f"{attention}.k_norm").variance_epsilon
    with pytest.raises(CheckpointError, match=r"self_attn\.k_norm spans all heads"):
        norms_of(whole, own, Shard(1, 2), "folder")


def test_projections_of_unknown_names_are_refused() -> None:
    config = LlamaConfig(**SIZES, vocab_size=64)
    with torch.device("meta"):
        whole, own = (AutoModelForCausalLM.from_config(c) for c in (config, shard_config(config, 2)))
    for model in (whole, own):
        model.model.layers[0].mlp.mystery = model.model.layers[0].mlp.down_proj
        del model.model.layers[0].mlp.down_proj
    with pytest.raises(CheckpointError, match=r"no rule says how model\.layers\.0\.mlp\.mystery"):
        parts_of(whole, own, config, Shard(0, 2), "folder")


def test_layers_whose_shapes_do_not_say_how_heads_are_divided_are_refused() -> None:
    config = GPT2Config(n_embd=64, n_head=4, n_layer=1, vocab_size=64)
    with torch.device("meta"):
        whole, own = (AutoModelForCausalLM.from_config(c) for c in (config, shard_config(config, 2)))
    with pytest.raises(CheckpointError, match=r"transformer\.h\.0\.attn\.c_attn is a Conv1D, which is not divided"):
        parts_of(whole, own, config, Shard(0, 2), "folder")


def test_files_of_an_embedding_model(tmp_path: Path) -> None:
    """They have the names of the model without a head, which the embedding stands in for."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=200))
    model.model.save_pretrained(tmp_path)
    change_json(tmp_path, lambda config: config.update(architectures=["LlamaForCausalLM"], tie_word_embeddings=False))
    change_tensors(tmp_path, lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()})
    with pytest.raises(CheckpointError, match=r"missing keys: lm_head\.weight"):
        load_shard(tmp_path, CPU, torch.float32, silent, Shard(1, 2))
    (tmp_path / "modules.json").write_text("[]")
    shard = load_shard(tmp_path, CPU, torch.float32, silent, Shard(1, 2)).model
    assert torch.equal(shard.model.embed_tokens.weight[:72], model.model.embed_tokens.weight[128:])
    assert shard.lm_head.weight.data_ptr() == shard.model.embed_tokens.weight.data_ptr()


def test_random_shards_have_the_geometry_of_real_ones(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, vocab_size=200).save_pretrained(tmp_path)
    sharded = dummy_shard(tmp_path, CPU, torch.float32, silent, Shard(1, 2))
    layer = sharded.model.model.layers[0]
    down = layer.mlp.down_proj
    assert (down.in_features, down.group_offset, down.group_skip) == (384, 6, 6)
    assert _dequantized(down).std() == pytest.approx(0.02, rel=0.3)
    assert layer.self_attn.q_proj.out_features == 192
    assert sharded.model.lm_head.weight.shape == (128, 192)


def test_fp4_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_nf4(tiny_model("llama", **SIZES), tmp_path / "model", bnb_4bit_quant_type="fp4")
    with pytest.raises(CheckpointError, match=r"layers\.0\.\S+\.weight in fp4 cannot be divided among GPUs yet"):
        load_shard(folder, CPU, torch.float32, silent, Shard(0, 2))


def test_mlps_whose_activation_spans_all_features_are_refused_by_name() -> None:
    reason = r"MLPs that keep the largest of all their features \(Gemma 3n\), which are not split; possible: 1"
    with pytest.raises(CheckpointError, match=f"tensor_parallel_size 2 does not divide the model: it has {reason}"):
        check_count(tiny_model("gemma3n_text").config, 64, 2, "model")


def test_layers_with_states_that_are_not_divided_are_refused_by_name() -> None:
    reason = "layers with Mamba2's states, which are not split yet; possible: 1"
    with pytest.raises(CheckpointError, match=f"tensor_parallel_size 2 does not divide the model: it has {reason}"):
        check_count(tiny_model("granitemoehybrid").config, 64, 2, "model")


@gpu
@pytest.mark.parametrize("count", [2, 4])
def test_parts_keep_their_nested_scales_on_a_gpu(count: int) -> None:
    n, k = 512, 8192
    q = quantized((n, k), 64, True, seed=count)
    whole = reference.dequantize(q.weight, torch.bfloat16)
    for rank in range(count):
        columns = range(rank * k // count, (rank + 1) * k // count)
        rows = range(rank * 99, rank * 99 + 99)
        for part in (Part((n, k), (range(n),), columns), Part((n, k), (rows,), range(k))):
            layer = cut_linear(q.packed, q.state, part, None, torch.bfloat16, torch.device("cuda"))
            linear = NF4Linear.of(layer)
            assert linear.absmax_8bit is not None
            found = cuda.dequantize(linear.weight, torch.bfloat16)
            expected = whole[part.rows[0].start : part.rows[0].stop, part.columns.start : part.columns.stop]
            assert torch.equal(found.cpu(), expected)
            assert linear.nbytes < 1.03 * (linear.out_features * linear.in_features) * (1 / 2 + 1 / 64 + 4 / 64 / 256)


def test_sinks_of_layers_with_numbers_of_heads_of_their_own() -> None:
    model, own = nn.Module(), nn.Module()
    for module, sizes in ((model, (8, 4)), (own, (4, 2))):
        layers = [SimpleNamespace(num_attention_heads=size) for size in sizes]
        text = SimpleNamespace(is_heterogeneous=True, per_layer_config=layers)
        module.config = SimpleNamespace(get_text_config=lambda text=text: text)
        for index, size in enumerate(sizes):
            module.register_parameter(f"sinks{index}", nn.Parameter(torch.zeros(size)))
        module.norm = nn.LayerNorm(8)
    assert sinks_of(model, own, Shard(1, 2)) == {"sinks0": (range(4, 8),), "sinks1": (range(2, 4),)}
