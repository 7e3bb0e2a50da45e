"""The output layer and a skip list's projections in NF4 while loading: the same as a checkpoint that has them in NF4."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.base import CheckpointError
from server.checkpoint.classes import loading_of
from server.checkpoint.dummy import dummy_model
from server.checkpoint.inspection import inspect_checkpoint
from server.checkpoint.late import Economies
from server.checkpoint.loading import load_model, whole_bytes
from server.config import EngineConfig
from server.engine.parallel.auto import check_config
from server.engine.runtime.limits import EngineConfigError
from tests.checkpoint.layouts import (
    CPU,
    PROMPTS,
    check_greedy,
    config_of,
    random_model,
    reference_model,
    save_nf4,
    served,
    silent,
)
from tests.checkpoint.test_layouts import LLAMA, llama

ALL = Economies(output_layer=True, skipped=True)


def loaded(folder: Path, economies: Economies) -> PreTrainedModel:
    return load_model(folder, CPU, torch.float32, silent, economies=economies)


def in_nf4(model: PreTrainedModel) -> set[str]:
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Linear4bit)}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with a skip list, and the same one without."""
    skipped = save_nf4(llama(), tmp_path / "skipped", llm_int8_skip_modules=["lm_head", "down_proj", "v_proj"])
    return skipped, save_nf4(llama(), tmp_path / "whole", llm_int8_skip_modules=["nothing"])


def test_what_is_asked_for_becomes_nf4_and_nothing_else(folders: tuple[Path, Path]) -> None:
    kept = {"q_proj", "k_proj", "o_proj", "gate_proj", "up_proj"}
    assert in_nf4(loaded(folders[0], Economies())) == kept
    assert in_nf4(loaded(folders[0], Economies(output_layer=True))) == {*kept, "lm_head"}
    # v_proj has 32 outputs, which kernels do not compute in NF4.
    assert in_nf4(loaded(folders[0], Economies(skipped=True))) == {*kept, "down_proj"}


def test_codes_and_answers_are_those_of_a_checkpoint_in_nf4(folders: tuple[Path, Path], tmp_path: Path) -> None:
    skipped, whole = folders
    stored = load_file(whole / "model.safetensors")
    model = loaded(skipped, ALL)
    for name in ("lm_head", "model.layers.1.mlp.down_proj"):
        layer = model.get_submodule(name)
        assert torch.equal(layer.weight.data.flatten(), stored[f"{name}.weight"].flatten())
        assert torch.equal(layer.weight.quant_state.absmax, stored[f"{name}.weight.absmax"])
    expected = reference_model(whole, tmp_path / "reference")
    mixed = reference_model(skipped, tmp_path / "mixed")
    for layer, other in zip(expected.model.layers, mixed.model.layers, strict=True):
        layer.self_attn.v_proj = other.self_attn.v_proj
    for prompt, found in zip(PROMPTS, served(skipped, economies=ALL), strict=True):
        check_greedy(expected, prompt, found)


def test_an_output_layer_with_a_bias_and_a_16_bit_checkpoint(tmp_path: Path) -> None:
    model = random_model(config_of("phi", **LLAMA | {"num_key_value_heads": 4}))
    nn.init.normal_(model.lm_head.bias)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    found = loaded(tmp_path, ALL).lm_head
    assert isinstance(found, Linear4bit)
    assert torch.equal(found.bias, model.lm_head.bias.float())


def test_the_bytes_that_are_counted(folders: tuple[Path, Path]) -> None:
    info = inspect_checkpoint(folders[0])
    chosen = loading_of(info)
    plain, small = (whole_bytes(info, CPU, torch.bfloat16, chosen, False, kind) for kind in (Economies(), ALL))
    quantized = 128 * 64 + 2 * (64 * 96 + 64 * 32)
    assert plain - small == pytest.approx(quantized * (2 - 0.516), rel=0.01)


def test_random_weights_do_the_same(tmp_path: Path) -> None:
    config = config_of("llama", **LLAMA)
    config.quantization_config = {"llm_int8_skip_modules": ["lm_head", "down_proj"]}
    config.save_pretrained(tmp_path)
    model = dummy_model(tmp_path, CPU, torch.float32, silent, seed=0, economies=ALL)
    assert {"lm_head", "down_proj"} <= in_nf4(model)
    assert not {"lm_head", "down_proj"} & in_nf4(dummy_model(tmp_path, CPU, torch.float32, silent, seed=0))


def test_an_output_layer_that_is_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = save_nf4(llama(tie_word_embeddings=True), tmp_path / "tied")
    with pytest.raises(
        CheckpointError, match=r"engine\.quantize_output_layer is nf4, but the output layer is the embed"
    ):
        loaded(folder, ALL)


@pytest.mark.parametrize("settings", [{"quantize_output_layer": "nf4"}, {"quantize_skipped": True}])
def test_several_gpus_are_refused_by_name(settings: dict[str, object]) -> None:
    with pytest.raises(EngineConfigError, match=f"engine.{next(iter(settings))}.* engine.tensor_parallel_size 2"):
        check_config(EngineConfig(**settings), 2)
