"""Checkpoints that are damaged or lack something: one line that says what it is and what helps, never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from server.checkpoint.loading import load_model
from tests.checkpoint.layouts import (
    CPU,
    Tensors,
    change_json,
    change_tensors,
    config_of,
    random_model,
    refusal,
    replaced,
    save_nf4,
    silent,
    state_with,
    without,
)
from tests.checkpoint.test_layouts import LLAMA
from tests.moe_checkpoints import save_moe, tiny_moe

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole NF4 checkpoint."""
    model = random_model(config_of("llama", **{**LLAMA, "intermediate_size": 320, "hidden_size": 128}))
    return save_nf4(model, tmp_path_factory.mktemp("checkpoints") / "good")


@pytest.fixture(scope="module")
def good_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    save_moe(folder, tiny_moe("qwen3_moe"))
    return folder


def refused(folder: Path) -> str:
    return refusal(lambda: load_model(folder, CPU, torch.float32, silent), folder)


CASES: list[tuple[Callable[[Tensors], object], str]] = [
    (replaced("model.norm.weight", lambda t: t[:-1]), "model.norm.weight is [127], config.json says [128]"),
    (replaced("model.embed_tokens.weight", lambda t: t[:, :64]), "model.embed_tokens.weight is [128, 64]"),
    (replaced(UP, lambda t: t[:-8]), f"{UP} is [320, 128] in blocks of 64, which takes 20480 of codes; there are 20472"),
    (replaced(f"{UP}.absmax", lambda t: t[:-1]), "which takes 640 of absmax; there are 639"),
    (replaced(f"{UP}.nested_absmax", lambda t: t[:-1]), "which takes 3 of nested_absmax; there are 2"),
    (replaced(f"{UP}.nested_absmax", lambda t: t * float("nan")), f"the scales (absmax) of {UP} are not finite"),
    (replaced("model.norm.weight", lambda t: t / 0), "model.norm.weight has values that are not finite"),
    (replaced("model.embed_tokens.weight", lambda t: t * float("nan")), "model.embed_tokens.weight has values"),
    (replaced(f"{UP}.quant_map", lambda t: t.flip(0)), f"{UP} says that it is in nf4, and its quant_map is not"),
    (without(f"{UP}.absmax"), f"{UP} is packed to 4 bits and has no absmax"),
    (without(f"{UP}.quant_state"), f"{UP} is [20480, 1], config.json says"),
    (without(f"{UP}."), "without their quant_state"),
    (state_with(UP, shape=[320, 64]), f"{UP} is [320, 64]"),
    (state_with(UP, blocksize=63), f"{UP} has blocks of 63"),
    (state_with(UP, blocksize="x"), f"the quant_state of {UP} is not bitsandbytes'"),
    (state_with(UP, nested_offset=float("inf")), f"the scales (absmax) of {UP} are not finite"),
    (state_with(UP, dtype="x"), f"the quant_state of {UP}"),
    (state_with(UP, dtype=None), f"the quant_state of {UP}"),
    (state_with(UP, nested_dtype=0), f"the quant_state of {UP}"),
    (state_with(UP, blocksize=float("inf")), f"the quant_state of {UP} is not bitsandbytes'"),
    (state_with(UP, quant_type="int4"), f"{UP} is in bitsandbytes' int4; NF4 and FP4 are served"),
    (without("model.norm.weight"), "missing keys: model.norm.weight"),
    (lambda t: t.update({"model.layers.0.mlp.up_proj.SCB": torch.ones(4)}), "is in bitsandbytes' 8 bit"),
]  # fmt: skip
DAMAGE = [change for change, _ in CASES]


@pytest.mark.parametrize(("change", "complaint"), CASES)
def test_damaged_tensors_are_named(
    good: Path, tmp_path: Path, change: Callable[[Tensors], object], complaint: str
) -> None:
    bad = shutil.copytree(good, tmp_path / "bad")
    change_tensors(bad, change)
    assert complaint in refused(bad)


@pytest.mark.parametrize(
    "change",
    [
        lambda entry, size: entry.update(dtype="F64"),
        lambda entry, size: entry.update(dtype="XX"),
        lambda entry, size: entry.update(shape=[2**62, 2**62]),
        lambda entry, size: entry.update(shape=[-1, 20480]),
        lambda entry, size: entry.update(shape="wide"),
        lambda entry, size: entry.update(data_offsets=[0, 20480]),
        lambda entry, size: entry.update(data_offsets=[entry["data_offsets"][1], entry["data_offsets"][0]]),
        lambda entry, size: entry.update(data_offsets=[size, size + 20480]),
        lambda entry, size: entry.update(data_offsets=[entry["data_offsets"][0], 2**40]),
        lambda entry, size: entry.clear(),
    ],
)
def test_a_header_that_lies_of_a_tensor(
    good: Path, good_experts: Path, tmp_path: Path, change: Callable[[dict[str, Any], int], object]
) -> None:
    for folder, name in ((good, UP), (good_experts, "model.layers.1.mlp.experts.3.up_proj.weight")):
        bad = shutil.copytree(folder, tmp_path / folder.name)
        file = bad / "model.safetensors"
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header[name], len(data) - 8 - length)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        refused(bad)


def test_plain_scales_that_are_not_finite(tmp_path: Path) -> None:
    folder = save_nf4(random_model(config_of("llama", **LLAMA)), tmp_path / "m", bnb_4bit_use_double_quant=False)
    change_tensors(folder, lambda tensors: tensors[f"{UP}.absmax"][7:8].fill_(float("inf")))
    assert f"the scales (absmax) of {UP} are not finite" in refused(folder)


def test_a_table_of_the_other_kind_is_told(good: Path, tmp_path: Path) -> None:
    from bitsandbytes.functional import get_4bit_type

    bad = shutil.copytree(good, tmp_path / "bad")
    change_tensors(bad, lambda t: t.update({f"{UP}.quant_map": get_4bit_type("fp4", device="cpu")}))
    assert "says that it is in nf4, and its quant_map is that of fp4" in refused(bad)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[]", "not a JSON object; fetch it again, or remove it"),
        ("{", "not JSON"),
        ("null", "not a JSON object"),
        ('{"eos_token_id": "</s>"}', "eos_token_id is '</s>'"),
        ('{"eos_token_id": [1, null]}', "eos_token_id is [1, None]"),
    ],
)
def test_a_bad_generation_config_is_named(good: Path, tmp_path: Path, text: str, complaint: str) -> None:
    bad = shutil.copytree(good, tmp_path / "bad")
    (bad / "generation_config.json").write_text(text)
    message = refused(bad)
    assert "generation_config.json" in message
    assert complaint in message


def test_the_rest_of_a_generation_config_is_not_transformers_to_judge(good: Path, tmp_path: Path) -> None:
    odd = shutil.copytree(good, tmp_path / "odd")
    settings = {"eos_token_id": [2, 7], "temperature": "hot", "top_k": [], "cache_implementation": 5}
    (odd / "generation_config.json").write_text(json.dumps(settings))
    model = load_model(odd, CPU, torch.float32, silent)
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == [2, 7]


def test_a_config_that_transformers_cannot_read(good: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(good, tmp_path / "bad")
    change_json(bad, lambda config: config.update(hidden_size="wide"))
    assert "config.json: transformers cannot read it" in refused(bad)
