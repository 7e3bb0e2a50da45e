"""Multimodal classes, divided among ranks: the tokens of one rank, from files in the names of all versions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from safetensors.torch import load_file

from server.checkpoint.base import CheckpointError
from server.checkpoint.classes import read_config
from server.checkpoint.sharding.sharded import ShardedModel, load_shard
from server.checkpoint.sharding.shards import Shard, possible_counts
from tests.checkpoint.layouts import (
    CPU,
    change_tensors,
    config_of,
    expanded,
    random_model,
    save_nf4,
    silent,
)
from tests.checkpoint.multimodal import CLASSES, LLAVA_NAMES, NEW_NAMES, QWEN_NAMES, divisible, renamed
from tests.moe_checkpoints import is_projection, separate_experts
from tests.parallel.rank import answers, answers_of_ranks, check_same
from tests.parallel.test_experts import compare

# Heads that divide the hidden size (Qwen, Mllama), layers that are left out (Mllama) or have sizes of their own (Gemma 4);
# test_images.py has text beside images of three more.
QUICK = ("mllama", "gemma4")
OTHERS = (
    "llava", "gemma3", "qwen2_5_vl", "llava_next", "mistral3", "qwen2_vl", "qwen3_vl", "idefics3", "smolvlm", "internvl",
    "aya_vision",
)  # fmt: skip


def test_every_class_is_here() -> None:
    # Llama 4 is a mixture of experts, which has a test of its own.
    assert {*QUICK, *OTHERS, "llama4"} == set(CLASSES)


def save(name: str, folder: Path) -> Path:
    """A small checkpoint of a class in NF4."""
    return save_nf4(random_model(config_of(name, **divisible(name))), folder)


# With four ranks, two have the same KV head.
@pytest.mark.parametrize(
    ("count", "names"),
    [
        pytest.param(2, QUICK, marks=pytest.mark.rest),
        pytest.param(2, OTHERS, marks=pytest.mark.slow),
        pytest.param(4, (*QUICK, "gemma3", "qwen2_5_vl"), marks=pytest.mark.slow),
    ],
)
def test_every_class_gives_the_tokens_of_one_rank(count: int, names: tuple[str, ...], tmp_path: Path) -> None:
    folders = {name: save(name, tmp_path / name) for name in names}
    found = answers_of_ranks(list(folders.values()), count, tmp_path / "store")[0]
    for name, folder in folders.items():
        check_same(found[str(folder)], answers(folder, None), name)


def gemma_4(name: str, folder: Path) -> Path:
    """A small Gemma 4 as one of its sizes is built."""
    settings = divisible("gemma4")
    text = settings["text_config"]
    if name == "26B-A4B":
        text |= {"attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 4}
        text |= {"moe_intermediate_size": 128}
        random_model(config_of("gemma4", **settings)).to(torch.bfloat16).save_pretrained(folder)
        return folder
    text |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128}
    text |= {"use_double_wide_mlp": True, "num_key_value_heads": 1}
    text["per_layer_config"] = {layer: {"head_dim": 64, "num_key_value_heads": 1} for layer in ("01", "03")}
    return save_nf4(random_model(config_of("gemma4", **settings)), folder)


@pytest.mark.rest
def test_gemma_4_of_every_size_gives_the_tokens_of_one_rank(tmp_path: Path) -> None:
    """Layers that share keys and values and have inputs of their own; experts next to an MLP."""
    folders = {name: gemma_4(name, tmp_path / name) for name in ("E2B", "26B-A4B")}
    found = answers_of_ranks(list(folders.values()), 2, tmp_path / "store")[0]
    for name, folder in folders.items():
        check_same(found[str(folder)], answers(folder, None), name)


def save_mixture(folder: Path, in_nf4: bool) -> Path:
    """Llama 4 with its image tower and with experts in two of four layers: in 16 bit, or an NF4 tensor for each expert."""
    settings = divisible("llama4")
    settings["text_config"] |= {
        "moe_layers": [1, 3], "num_local_experts": 4, "hidden_size": 128, "intermediate_size": 576,
        "intermediate_size_mlp": 256,
    }  # fmt: skip
    random_model(config_of("llama4", **settings)).save_pretrained(folder)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        saved = {}
        for name, tensor in tensors.items():
            for own, part in separate_experts(name, tensor).items():
                if not is_projection(own) or not own.startswith("language_model."):
                    saved[own] = part
                    continue
                packed, state = quantize_4bit(part.contiguous(), blocksize=64, quant_type="nf4")
                saved |= {own: packed, **{f"{own}.{k}": value for k, value in state.as_dict(packed=True).items()}}
        return saved

    return change_tensors(folder, change) if in_nf4 else folder


@pytest.mark.slow
def test_a_mixture_of_experts_with_an_image_tower(tmp_path: Path) -> None:
    folders = [save_mixture(tmp_path / name, in_nf4=name == "nf4") for name in ("16 bit", "nf4")]
    ranks = answers_of_ranks(folders, 2, tmp_path / "store")
    for folder in folders:
        expected = answers(folder, None)
        for found in ranks:
            # 9 scale blocks, so that the second rank has one of zeros.
            compare(found[str(folder)], expected, 0.62, folder.name)


def shard_of(folder: Path) -> ShardedModel:
    return load_shard(folder, CPU, torch.float32, silent, Shard(1, 2))


def test_names_of_other_versions_give_the_same_shard(tmp_path: Path) -> None:
    for name in ("mistral3", "qwen2_vl"):
        folder = save(name, tmp_path / name)
        expected = shard_of(folder).model.state_dict()
        for index, changes in enumerate((LLAVA_NAMES, NEW_NAMES) if name == "mistral3" else (QWEN_NAMES,)):
            other = shutil.copytree(folder, tmp_path / f"{name}-{index}")
            change_tensors(other, renamed(*changes))
            found = shard_of(other).model.state_dict()
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), changes


def test_an_output_layer_that_the_configuration_ties_and_the_files_do_not(tmp_path: Path) -> None:
    """Mistral 3's configuration ties both unless it says otherwise; the files decide, as they do for one GPU."""
    folder = save("mistral3", tmp_path / "model")
    assert read_config(folder).tie_word_embeddings
    model = shard_of(folder).model
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    head = torch.randn(128, 64)
    change_tensors(folder, lambda tensors: tensors | {"lm_head.weight": head})
    model = shard_of(folder).model
    assert torch.equal(model.get_output_embeddings().weight, head[64:])
    assert not torch.equal(model.get_input_embeddings().weight, head[64:])


def test_an_output_layer_in_nf4_is_expanded(tmp_path: Path) -> None:
    model = random_model(config_of("llava", **divisible("llava")))
    folder = save_nf4(model, tmp_path / "model", llm_int8_skip_modules=["vision_tower", "multi_modal_projector"])
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if name.endswith("lm_head.weight"))
    assert stored[name].dtype == torch.uint8
    found = shard_of(folder).model.get_output_embeddings().weight
    assert torch.allclose(found, expanded(stored)[name][64:], atol=1e-2)


def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    folder = save("gemma4", tmp_path / "model")
    assert possible_counts(read_config(folder), 64) == [1, 2, 4]
    with pytest.raises(CheckpointError, match="8 heads, 2 and 4 KV heads and 256 features of the MLP"):
        load_shard(folder, CPU, torch.float32, silent, Shard(0, 3))
