"""Checkpoints of hybrid models in the layouts that people have: tokens equal to transformers' own with the same weights."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from nf4_kernels import reference
from nf4_kernels.format import Weight
from server.checkpoint.base import CheckpointError
from server.checkpoint.dummy import dummy_model
from server.checkpoint.inspection import inspect_checkpoint
from server.checkpoint.loading import load_model
from server.checkpoint.states import STATE_TYPES
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.start import load_runner
from tests.checkpoint.layouts import (
    CONFIG,
    CPU,
    NEW_TOKENS,
    PROMPTS,
    change_tensors,
    check_greedy,
    check_served,
    config_of,
    random_model,
    save_nf4,
    served,
    silent,
)
from tests.engine.factories import make_request, run_together, tokens
from tests.engine.models import COMMON, HYBRIDS, MAMBA2
from tests.marks import with_rest
from tests.moe_checkpoints import save_moe

# The publisher's list for Qwen3.5's successors.
SKIPPED = ["lm_head", "model.visual", "in_proj_a", "in_proj_b", "in_proj_qkv"]
_QWEN3_5 = COMMON | HYBRIDS["qwen3_5_text"] | {"max_position_embeddings": 256}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}
_WITH_IMAGES: dict[str, Any] = {
    "vision_config": {
        "depth": 1, "num_heads": 2, "intermediate_size": 32, "patch_size": 14, "hidden_size": 32,
        "out_hidden_size": 64, "num_position_embeddings": 16,
    },
    "image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5": {"text_config": _QWEN3_5, **_WITH_IMAGES},
    "qwen3_5_moe_text": _QWEN3_5 | _EXPERTS,
    "qwen3_next": _QWEN3_5 | _EXPERTS | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
    "lfm2_moe": COMMON | HYBRIDS["lfm2"] | _EXPERTS | {"num_dense_layers": 1, "max_position_embeddings": 256},
    "lfm2": COMMON | HYBRIDS["lfm2"] | {"max_position_embeddings": 256},
    "lfm2_vl": {
        "text_config": COMMON | HYBRIDS["lfm2"] | {"model_type": "lfm2", "max_position_embeddings": 256},
        "vision_config": {
            "model_type": "siglip2_vision_model",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 14,
            "num_patches": 16,
        },
        "image_token_id": 120,
        "projector_hidden_size": 32,
    },
    "qwen3_5_moe": {"text_config": _QWEN3_5 | _EXPERTS, **_WITH_IMAGES},
    "falcon_h1": COMMON | HYBRIDS["falcon_h1"] | {"mamba_rms_norm": True, "max_position_embeddings": 256},
    "bamba": COMMON | MAMBA2 | {"attn_layer_indices": [1], "max_position_embeddings": 256},
    "nemotron_h": COMMON | HYBRIDS["nemotron_h"] | {"max_position_embeddings": 256},
    "granitemoehybrid": COMMON | HYBRIDS["granitemoehybrid"] | {"num_local_experts": 8, "intermediate_size": 64},
}


def made(model_type: str, **sizes: Any) -> PreTrainedModel:
    """A random model; sizes: of its text model, others than those of MODELS."""
    settings = MODELS[model_type]
    if sizes and "text_config" in settings:
        own: dict[str, dict[str, Any]] = {"text_config": settings["text_config"] | sizes}
        if "out_hidden_size" in settings["vision_config"]:
            own["vision_config"] = settings["vision_config"] | {"out_hidden_size": own["text_config"]["hidden_size"]}
        sizes = own
    model = random_model(config_of(model_type, **settings | sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 8)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.add_(torch.randn_like(buffer) / 4)
    return model


def test_every_type_is_tested() -> None:
    assert set(MODELS) == STATE_TYPES


@pytest.mark.parametrize("model_type", MODELS)
def test_nf4_as_bitsandbytes_saves_it(model_type: str, tmp_path: Path) -> None:
    folder = save_nf4(made(model_type), tmp_path / "model")
    packed = inspect_checkpoint(folder).packed
    inputs = (
        "in_proj_a.weight",
        "in_proj_ba.weight",
        "conv.in_proj.weight",
        "mamba.in_proj.weight",
        "mixer.in_proj.weight",
    )
    assert any(name.endswith(inputs) for name in packed)
    check_served(folder)


@pytest.mark.parametrize("model_type", ["qwen3_5_moe_text", "qwen3_next", "lfm2_moe", "granitemoehybrid", "nemotron_h"])
def test_experts_in_nf4(model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the heads that predict several tokens, whose experts are no layer's."""
    folder = tmp_path / "model"
    reference = save_moe(folder, made(model_type).float())
    change_tensors(folder, lambda found: found | {"mtp.layers.0.mlp.experts.gate_up_proj": torch.ones(8, 4, 4)})
    config = CONFIG.model_copy(update={"enforce_eager": False})
    with caplog.at_level(logging.INFO):
        found = served(folder, config)
    assert re.search(r"\d layers? of 8 experts in NF4", caplog.text)
    assert "layers run by the server's own code" in caplog.text
    for prompt, answer in zip(PROMPTS, found, strict=True):
        check_greedy(reference, prompt, answer)


def test_experts_between_projections_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nemotron 3 Super's."""
    settings = MODELS["nemotron_h"] | {"moe_latent_size": 32}
    reference = save_moe(tmp_path / "model", random_model(config_of("nemotron_h", **settings)).float())
    with caplog.at_level(logging.INFO):
        found = served(tmp_path / "model", CONFIG.model_copy(update={"enforce_eager": False}))
    assert "layers run by the server's own code" in caplog.text
    for prompt, answer in zip(PROMPTS, found, strict=True):
        check_greedy(reference, prompt, answer)


@pytest.mark.parametrize("eager", [True, False], ids=["transformers' layers", "written layers"])
def test_the_publishers_skip_list(tmp_path: Path, eager: bool) -> None:
    """Its compute dtype, float16, is the file's and not the engine's: states stay in float32."""
    settings: dict[str, Any] = {"llm_int8_skip_modules": SKIPPED, "bnb_4bit_compute_dtype": torch.float16}
    folder = save_nf4(made("qwen3_5"), tmp_path / "model", **settings)
    packed = {name.split(".")[-2] for name in inspect_checkpoint(folder).packed}
    assert {"in_proj_z", "out_proj", "q_proj", "down_proj"} <= packed
    assert packed.isdisjoint(SKIPPED)
    config = CONFIG.model_copy(update={"enforce_eager": eager})
    check_served(folder, config)
    runner = build_runner(load_model(folder, CPU, torch.float32, silent), config)
    assert runner.states is not None
    assert all(kind.tensors[1].dtype is torch.float32 for kind in runner.states.kinds)


def test_mixers_in_16_bit(tmp_path: Path) -> None:
    """As Unsloth has them of Granite 4."""
    folder = save_nf4(
        made("granitemoehybrid"), tmp_path / "model", llm_int8_skip_modules=["lm_head", "in_proj", "out_proj"]
    )
    packed = inspect_checkpoint(folder).packed
    assert any("shared_mlp" in name for name in packed)
    assert not any("mamba" in name for name in packed)
    check_served(folder)


def test_16_bit_quantized_while_loading(tmp_path: Path) -> None:
    """But for the projections with one output for each head."""
    folder = tmp_path / "model"
    made("qwen3_5").to(torch.bfloat16).save_pretrained(folder)
    model = load_model(folder, CPU, torch.float32, silent)
    kinds = {name.rpartition(".")[2]: type(m) for name, m in model.named_modules() if "in_proj" in name}
    assert kinds == {
        "in_proj_qkv": Linear4bit, "in_proj_z": Linear4bit, "in_proj_b": nn.Linear, "in_proj_a": nn.Linear,
    }  # fmt: skip
    stored = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.0.linear_attn.in_proj_a.weight"
    assert torch.equal(model.get_parameter(name), stored[name].float())
    for linear_name, linear in [*model.named_modules()]:
        if isinstance(linear, Linear4bit):
            plain = nn.Linear(linear.in_features, linear.out_features, bias=False)
            # bitsandbytes' own is wrong on CPU if k is no multiple of 64.
            weight = Weight.from_quant_state(linear.weight, linear.weight.quant_state)
            plain.weight.data = reference.dequantize(weight, torch.float32)
            model.set_submodule(linear_name, plain)
    for prompt, found in zip(PROMPTS, served(folder), strict=True):
        check_greedy(model, prompt, found)


def test_heads_that_predict_several_tokens_are_ignored(tmp_path: Path) -> None:
    folder = save_nf4(made("qwen3_5"), tmp_path / "model")
    before = inspect_checkpoint(folder).loaded_bytes(4)
    extra = {"mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4), "mtp.fc.weight": torch.ones(4, 4)}
    change_tensors(folder, lambda found: found | extra)
    assert inspect_checkpoint(folder).loaded_bytes(4) > before
    check_served(folder)


@pytest.mark.parametrize("model_type", with_rest(["qwen3_5_text", "nemotron_h", "falcon_h1"], ["falcon_h1"]))
def test_random_weights_for_benchmarks(model_type: str, tmp_path: Path) -> None:
    made(model_type).save_pretrained(tmp_path)
    config = CONFIG.model_copy(update={"load_format": "dummy", "threads": 1})
    engine = Engine(load_runner(tmp_path, config, silent), config)
    requests = [make_request(prompt, max_tokens=NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    outputs = run_together(engine, *requests)
    assert [len(tokens(outputs[request.request_id])) for request in requests] == [NEW_TOKENS] * len(PROMPTS)


def test_random_weights_have_the_buffers_that_a_model_sets_for_its_layers(tmp_path: Path) -> None:
    whole = made("falcon_h1")
    whole.save_pretrained(tmp_path)
    found = dummy_model(tmp_path, torch.device("cpu"), torch.float32, silent, 0)
    buffers = {name: value for name, value in whole.named_buffers() if name.endswith("mup_vector")}
    assert buffers
    assert all(torch.equal(found.get_buffer(name), value) for name, value in buffers.items())


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"speculation": "draft", "draft_model": "another"}, "engine.speculation draft"),
        ({"batch_invariant": True}, "engine.batch_invariant"),
    ],
)
def test_what_layers_with_states_do_not_do_is_refused_before_weights_are_read(
    options: dict[str, Any], what: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    made("qwen3_5").to(torch.bfloat16).save_pretrained(folder)
    with pytest.raises(CheckpointError, match=what):
        load_runner(folder, EngineConfig(**CONFIG.model_dump() | options), silent)
