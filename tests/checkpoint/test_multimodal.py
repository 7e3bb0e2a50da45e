"""Multimodal classes serve text, in the names that they are saved under: tokens equal to transformers' own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from server.checkpoint.base import CheckpointError
from server.checkpoint.classes import keep_within_tables
from server.checkpoint.loading import load_model
from server.engine.core import Engine
from server.engine.runtime.limits import EngineConfigError
from server.engine.runtime.preparation.assembly import build_runner
from tests.checkpoint.layouts import (
    CONFIG,
    CPU,
    NEW_TOKENS,
    change_json,
    change_tensors,
    check_answers,
    check_greedy,
    check_served,
    config_of,
    random_model,
    reference_model,
    save_nf4,
    served,
    silent,
)
from tests.checkpoint.multimodal import CLASSES, GEMMA_3N_TEXT, LLAVA_NAMES, NEW_NAMES, QWEN_NAMES, renamed
from tests.engine.factories import make_request, run_together, tokens
from tests.marks import with_rest

QUICK = ("gemma3", "gemma4", "llama4", "llava", "qwen2_5_vl")


@pytest.mark.parametrize("model_type", with_rest(CLASSES, QUICK))
def test_every_class_serves_text(model_type: str, tmp_path: Path) -> None:
    folder = save_nf4(random_model(config_of(model_type, **CLASSES[model_type])), tmp_path / "model")
    packed = [name for name in load_file(folder / "model.safetensors") if name.endswith("bitsandbytes__nf4")]
    assert any("layers.0.self_attn.q_proj" in name for name in packed)
    check_served(folder)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_gemma_3n_serves_text_without_the_packages_of_its_towers(prefix: str, tmp_path: Path) -> None:
    """As its checkpoints are: the text's tensors under a prefix, and a configuration with all parts."""
    text = save_nf4(random_model(config_of("gemma3n_text", **GEMMA_3N_TEXT)), tmp_path / "text")
    expected = reference_model(text, tmp_path / "reference")
    folder = shutil.copytree(text, tmp_path / "model")
    change_tensors(folder, renamed(("model.", prefix)))
    tower = {
        "model.vision_tower.timm_model.conv_stem.weight": torch.ones(4),
        "model.embed_audio.hard.weight": torch.ones(4),
    }
    change_tensors(folder, lambda tensors: tensors | tower)
    whole = config_of("gemma3n", text_config=GEMMA_3N_TEXT).to_dict() | {
        "architectures": ["Gemma3nForConditionalGeneration"]
    }
    quantization = json.loads((text / "config.json").read_text())["quantization_config"]
    (folder / "config.json").write_text(json.dumps(whole | {"quantization_config": quantization}))
    check_answers(expected, served(folder))


def test_tokens_that_gemma_3ns_second_table_lacks(tmp_path: Path) -> None:
    """Those of images and sounds: transformers gives them its first row, if not in all versions."""
    settings = {**GEMMA_3N_TEXT, "vocab_size_per_layer_input": 100}
    folder = save_nf4(random_model(config_of("gemma3n_text", **settings)), tmp_path / "model")
    reference = reference_model(folder, tmp_path / "reference")
    keep_within_tables(reference)
    prompt = [5, 127, 100, 99, 3]
    runner = build_runner(load_model(folder, CPU, torch.float32, silent), CONFIG)
    request = make_request(prompt, max_tokens=NEW_TOKENS, ignore_eos=True)
    found = run_together(Engine(runner, CONFIG), request)[request.request_id]
    check_greedy(reference, prompt, tokens(found))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *((name, change) for name in ("llava", "mistral3", "gemma3") for change in (LLAVA_NAMES, NEW_NAMES)),
        *((name, QWEN_NAMES) for name in ("qwen2_vl", "qwen2_5_vl")),
        ("mllama", (*LLAVA_NAMES[:2], ("model.vision_model.", "vision_model."), *LLAVA_NAMES[3:])),
    ],
)
def test_names_of_other_versions(model_type: str, changes: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    folder = save_nf4(random_model(config_of(model_type, **CLASSES[model_type])), tmp_path / "model")
    change_tensors(folder, renamed(*changes))
    check_served(folder)


def test_names_of_gemma_4_that_transformers_does_not_read(tmp_path: Path) -> None:
    """Quantized layers, those of the tower among them, stay so under each of the names that publishers use."""
    folder = save_nf4(random_model(config_of("gemma4", **CLASSES["gemma4"])), tmp_path / "model")
    expected = served(folder)
    whole = load_model(folder, CPU, torch.float32, silent, towers=True).state_dict()
    text = "model.language_model."
    forms = (LLAVA_NAMES, ((text, "model."),), ((text, "language_model.model."), ("model.", "")))
    for index, changes in enumerate(forms):
        other = shutil.copytree(folder, tmp_path / str(index))
        change_tensors(other, renamed(*changes))
        found = load_model(other, CPU, torch.float32, silent, towers=True).state_dict()
        assert found.keys() == whole.keys()
        assert all(found[name].dtype == tensor.dtype for name, tensor in whole.items())
        assert served(other) == expected


@pytest.mark.parametrize(
    "skipped",
    [
        ["vision_tower", "multi_modal_projector", "lm_head"],
        # One name for each module, in names of 4.x, of layers of the text, too: the list of dynamic quantizations.
        ["language_model.lm_head", "language_model.model.layers.0.mlp", "vision_tower.layers.0.attention", "lm_head"],
        ["lm_head", "model.language_model.layers.1.self_attn.o_proj", "model.vision_tower.encoder.layers.0.mlp.fc1"],
    ],
)
def test_skip_lists_of_modules_and_in_old_names(skipped: list[str], tmp_path: Path) -> None:
    in_file = [name.replace("language_model.model.", "model.language_model.") for name in skipped]
    model = random_model(config_of("mistral3", **CLASSES["mistral3"]))
    folder = save_nf4(model, tmp_path / "model", llm_int8_skip_modules=in_file)
    change_json(folder, lambda config: config["quantization_config"].update(llm_int8_skip_modules=skipped))
    check_served(folder)


def test_a_quantization_config_in_the_text_part(tmp_path: Path) -> None:
    folder = save_nf4(random_model(config_of("gemma3", **CLASSES["gemma3"])), tmp_path / "model")
    change_json(folder, lambda c: c["text_config"].update(quantization_config=c.pop("quantization_config")))
    check_served(folder)


@pytest.mark.parametrize("model_type", ["gemma3", "idefics3", "mllama"])
def test_towers_take_no_memory(model_type: str, tmp_path: Path) -> None:
    model = random_model(config_of(model_type, **CLASSES[model_type]))
    save_nf4(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model", CPU, torch.float32, silent)
    names = [name for name, _ in loaded.named_parameters()]
    assert not [name for name in names if "vision" in name or "projector" in name or "cross_attn" in name]


def test_a_16_bit_checkpoint_is_quantized_while_loading(tmp_path: Path) -> None:
    model = random_model(config_of("qwen2_5_vl", **CLASSES["qwen2_5_vl"]))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, CPU, torch.float32, silent)
    layer = loaded.get_decoder().layers[1]
    assert layer.mlp.up_proj.weight.dtype == layer.self_attn.q_proj.weight.dtype == torch.uint8


def test_gemma_4_without_a_token_for_padding_is_named(tmp_path: Path) -> None:
    folder = save_nf4(random_model(config_of("gemma4", **CLASSES["gemma4"])), tmp_path / "model")
    change_json(folder, lambda config: config["text_config"].update(pad_token_id=None))
    with pytest.raises(CheckpointError, match="text_config has no pad_token_id"):
        load_model(folder, CPU, torch.float32, silent)


def test_contexts_of_llama_4_are_of_one_chunk(tmp_path: Path) -> None:
    folder = save_nf4(random_model(config_of("llama4", **CLASSES["llama4"])), tmp_path / "model")
    assert build_runner(load_model(folder, CPU, torch.float32, silent), CONFIG).limits.max_model_len == 64


def test_chunks_that_are_too_short_are_named(tmp_path: Path) -> None:
    settings = {**CLASSES["llama4"], "text_config": {**CLASSES["llama4"]["text_config"], "attention_chunk_size": 16}}
    folder = save_nf4(random_model(config_of("llama4", **settings)), tmp_path / "model")
    with pytest.raises(EngineConfigError, match="the model's contexts end after 16 tokens, at least 32 are needed"):
        build_runner(load_model(folder, CPU, torch.float32, silent), CONFIG)
