"""Checkpoints in the layouts that people have: tokens equal to transformers' own with the same weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from server.checkpoint import loading
from server.checkpoint.base import CheckpointError
from server.checkpoint.packed import keeps_fp4
from tests.checkpoint.layouts import (
    CPU,
    change_json,
    change_tensors,
    check_served,
    config_of,
    random_model,
    save_nf4,
    silent,
)

LLAMA: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def llama(**settings: Any) -> Any:
    return random_model(config_of("llama", **{**LLAMA, **settings}))


@pytest.mark.parametrize("quantization", [{}, {"bnb_4bit_use_double_quant": False}])
def test_scales_nested_and_plain(tmp_path: Path, quantization: dict[str, Any]) -> None:
    check_served(save_nf4(llama(), tmp_path / "model", **quantization))


def test_nf4_tensors_under_a_config_that_does_not_say_so(tmp_path: Path) -> None:
    folder = save_nf4(llama(), tmp_path / "model")
    change_json(folder, lambda config: config.pop("quantization_config"))
    check_served(folder)


def test_bitsandbytes_fields_without_a_method(tmp_path: Path) -> None:
    folder = save_nf4(llama(), tmp_path / "model")
    change_json(folder, lambda config: config["quantization_config"].pop("quant_method"))
    check_served(folder)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_fp4(tmp_path: Path, double: bool, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, as the CPU kernels take it, and expanded, as on GPUs."""
    assert keeps_fp4(CPU)
    assert not keeps_fp4(torch.device("cuda"))
    if not kept:
        monkeypatch.setattr(loading, "keeps_fp4", lambda device: False)
    quantization = {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": double}
    folder = save_nf4(llama(), tmp_path / "model", **quantization)
    layer = loading.load_model(folder, CPU, torch.float32, silent).get_decoder().layers[1].mlp.down_proj
    assert layer.weight.dtype is (torch.uint8 if kept else torch.float32)
    check_served(folder)


def test_fp4_beside_nf4(tmp_path: Path) -> None:
    """Projections of one input in both, which cannot be one GEMM."""
    folder = save_nf4(llama(), tmp_path / "model", bnb_4bit_quant_type="fp4")
    other = load_file(save_nf4(llama(), tmp_path / "nf4") / "model.safetensors")
    part = ("k_proj", "up_proj")
    change_tensors(
        folder,
        lambda tensors: (
            {name: t for name, t in tensors.items() if not any(p in name for p in part)}
            | {name: t for name, t in other.items() if any(p in name for p in part)}
        ),
    )
    check_served(folder)


def test_a_tied_output_layer_that_was_quantized(tmp_path: Path) -> None:
    """The file has lm_head in NF4 although config.json ties it to the embedding, which is in 16 bit."""
    folder = save_nf4(llama(tie_word_embeddings=False), tmp_path / "model", llm_int8_skip_modules=["nothing"])
    change_json(folder, lambda config: config.update(tie_word_embeddings=True))
    assert "lm_head.weight.absmax" in load_file(folder / "model.safetensors")
    check_served(folder)


def test_a_tied_output_layer_that_the_skip_list_forgets(tmp_path: Path) -> None:
    """config.json's skip list has no lm_head, and the file has none either: it is the embedding."""
    folder = save_nf4(llama(tie_word_embeddings=True), tmp_path / "model")
    change_json(folder, lambda config: config["quantization_config"].update(llm_int8_skip_modules=["vision_tower"]))
    check_served(folder)


def test_layers_in_16_bit_that_no_skip_list_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    skipped = ["model.layers.0.mlp", "model.layers.1.self_attn.o_proj", "lm_head"]
    folder = save_nf4(llama(), tmp_path / "model", llm_int8_skip_modules=skipped)
    change_json(folder, lambda config: config["quantization_config"].pop("llm_int8_skip_modules"))
    with caplog.at_level(logging.INFO):
        check_served(folder)
    assert "model: 10 linear layers in NF4, 5 in float32" in caplog.text


def test_codes_stored_as_bfloat16(tmp_path: Path) -> None:
    check_served(save_nf4(llama(), tmp_path / "model", bnb_4bit_quant_storage=torch.bfloat16))


def test_a_conversion_that_fails_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers points to a report above, and makes none."""
    folder = save_nf4(random_model(config_of("llama", **LLAMA)), tmp_path / "model")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("We encountered some issues during conversion. For details look at the above report!")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match="cannot be done with tensors in 4 bit; the same model in 16 bit"):
        loading.load_model(folder, CPU, torch.float32, silent)
