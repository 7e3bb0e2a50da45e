"""load_model on real files: the embedded model, a 16-bit model quantized on the way in, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from server.checkpoint.base import CheckpointError
from server.checkpoint.loading import load_model
from server.checkpoint.source import resolve_checkpoint
from tests.checkpoint.layouts import CPU, silent


@pytest.fixture
def bf16_folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def test_the_embedded_model_loads_in_the_dtype_asked_for(embedded_folder: Path) -> None:
    seen: list[float] = []
    model = load_model(embedded_folder, CPU, torch.float32, lambda _, fraction: seen.append(fraction))
    layers = [m for m in model.modules() if isinstance(m, Linear4bit)]
    assert len(layers) == 30 * 7
    assert all(m.weight.quant_state.nested and m.weight.quant_state.quant_type == "nf4" for m in layers)
    assert all(m.compute_dtype == torch.float32 for m in layers)
    assert model.lm_head.weight.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert not model.training
    assert seen[0] == 0.0
    assert seen[-1] == 1.0


def test_a_16_bit_model_is_quantized_while_loading(bf16_folder: Path) -> None:
    model = load_model(bf16_folder, CPU, torch.float32, silent)
    layer = model.model.layers[1].mlp.up_proj
    assert isinstance(layer, Linear4bit)
    assert layer.weight.dtype == torch.uint8
    assert layer.weight.numel() == 192 * 128 // 2
    assert not isinstance(model.lm_head, Linear4bit)
    stored = load_file(bf16_folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].float()
    layer.support_avx512bf16_for_cpu = False
    got = layer(torch.eye(128)).T
    # NF4's widest gap between neighbouring codes is 0.31 of the block's maximum: half of it bounds the error.
    assert (got - stored).abs().max() <= 0.16 * stored.abs().max()


def test_a_model_too_large_for_the_memory_is_refused_before_reading_it(bf16_folder: Path) -> None:
    size = 2**40
    header = json.dumps({"a.weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (bf16_folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)  # sparse: takes no disk
    with pytest.raises(CheckpointError, match=r"too large: its weights take 1024\.0 GiB"):
        load_model(bf16_folder, CPU, torch.float32, silent)


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "../x", "a/b/c", ""])
def test_an_unknown_name_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such folder|not a folder|No such|config\.json"):
        resolve_checkpoint(name, tmp_path, silent)
