"""inspect_checkpoint: what is refused, and that the one-line message names the file and the reason."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from server.checkpoint.inspection import inspect_checkpoint
from tests.checkpoint.layouts import refusal

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def write(folder: Path, quantization: dict[str, Any] | None = None, **config: Any) -> Path:
    settings = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config}
    if quantization is not None:
        settings["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({"model.norm.weight": torch.ones(8)}, folder / "model.safetensors")
    return folder


def refused(folder: Path) -> str:
    return refusal(lambda: inspect_checkpoint(folder), folder)


def test_the_embedded_model_is_a_whole_nf4_checkpoint(embedded_folder: Path) -> None:
    info = inspect_checkpoint(embedded_folder)
    assert info.quantization == "nf4"
    assert info.architecture == "LlamaForCausalLM"
    assert 100e6 < info.loaded_bytes(2) < info.loaded_bytes(4) < 200e6


def test_an_unquantized_checkpoint_is_accepted(tmp_path: Path) -> None:
    assert inspect_checkpoint(write(tmp_path)).quantization == "none"


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8 bit"),
        ({"load_in_8bit": True}, "8 bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "no weight in it is in NF4"),
        ({**NF4, "quant_method": "awq"}, "awq"),
        (NF4, "no weight in it is in NF4"),
    ],
)
def test_other_quantizations_are_refused_by_name(tmp_path: Path, quantization: dict[str, Any], reason: str) -> None:
    assert reason in refused(write(tmp_path, quantization))


def test_a_quantization_beside_the_configuration_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert "quantized by ModelOpt with NVFP4" in refused(write(tmp_path))


@pytest.mark.parametrize("key", ["model_type", "architectures"])
def test_what_a_configuration_lacks_is_named(tmp_path: Path, key: str) -> None:
    config = json.loads((write(tmp_path) / "config.json").read_text())
    del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"names no {key}" in refused(tmp_path)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    assert "decoder-only" in refused(write(tmp_path, is_encoder_decoder=True))


def test_a_missing_folder_config_or_weight_file_is_named(tmp_path: Path) -> None:
    assert "not a folder" in refused(tmp_path / "absent")
    assert "config.json" in refused(tmp_path)
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors" in refused(tmp_path)


def test_an_adapter_names_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    assert f"serve its base (some/base) with --lora-modules NAME={tmp_path}" in refused(tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    assert "git lfs pull" in refused(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002.safetensors" in refused(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"model_type": 3}', "\x00"])
def test_a_damaged_config_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in refused(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_a_truncated_weight_file_is_refused(tmp_path: Path, kept: int) -> None:
    file = write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "damaged" in refused(tmp_path)


@pytest.mark.parametrize("header", [b"[]", b"{}x", b'{"a": {}}', b'{"a": 1}', b"\xff\xfe"])
def test_a_weight_file_with_a_nonsense_header_is_refused(tmp_path: Path, header: bytes) -> None:
    (write(tmp_path) / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "damaged" in refused(tmp_path)


def test_a_header_that_claims_more_than_the_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "claims" in refused(tmp_path)
