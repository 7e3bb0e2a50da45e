"""Adapters that are more than two factors beside a projection: the engine's tokens are PEFT's, in mixed batches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from server.checkpoint.base import CheckpointError
from server.checkpoint.loading import load_model
from server.checkpoint.lora import read_adapter
from server.engine.core import Engine
from server.engine.runtime.model.lora import adding_masked
from server.engine.runtime.preparation.assembly import build_runner
from tests.adapters import ALL_PROJECTIONS, change_adapter, save_adapter, with_adapter
from tests.checkpoint.layouts import CPU, config_of, random_model, reference_model, save_nf4, silent
from tests.checkpoint.multimodal import CLASSES
from tests.checkpoint.test_layouts import LLAMA
from tests.engine.model.test_lora import PROMPTS, TOKENS, check_answers, config_with, expected, finish, start
from tests.engine.models import tiny_model
from tests.marks import with_rest

ATTENTION = ["q_proj", "v_proj", "o_proj"]
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "DoRA": ("llama", {}, {"use_dora": True, "target_modules": ALL_PROJECTIONS}),
    "DoRA beside biases": ("qwen2", {}, {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    "rank-stabilized DoRA": ("llama", {}, {"use_dora": True, "use_rslora": True, "target_modules": ["k_proj"]}),
    "biases of all": ("qwen2", {}, {"bias": "all", "target_modules": ["q_proj"]}),
    "biases of adapted": ("qwen2", {}, {"bias": "lora_only", "target_modules": ATTENTION}),
    "biases of the adapter": ("llama", {}, {"lora_bias": True, "target_modules": ATTENTION}),
    "whole output layer": ("llama", {}, {"modules_to_save": ["lm_head"], "target_modules": ATTENTION}),
    "whole embedding": ("llama", {}, {"modules_to_save": ["embed_tokens"], "target_modules": ATTENTION}),
    "both whole": ("llama", {}, {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ATTENTION}),
    "both whole, tied": (
        "llama",
        {"tie_word_embeddings": True},
        {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ATTENTION},
    ),
    "output layer": ("llama", {}, {"target_modules": ["lm_head", *ATTENTION]}),
    "embedding": ("llama", {}, {"target_modules": ["embed_tokens", *ATTENTION]}),
    "both, tied": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["embed_tokens", "lm_head", *ATTENTION]},
    ),
    "tokens": ("llama", {}, {"trainable_token_indices": [5, 9, 60], "target_modules": ATTENTION}),
    "tokens, tied": (
        "llama",
        {"tie_word_embeddings": True},
        {"trainable_token_indices": {"embed_tokens": [5, 9, 60]}, "target_modules": ATTENTION},
    ),
    "DoRA of both": ("llama", {}, {"use_dora": True, "target_modules": ["lm_head", "embed_tokens", "v_proj"]}),
    "DoRA, tied": (
        "llama",
        {"tie_word_embeddings": True},
        {"use_dora": True, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    ),
    "DoRA of a scaled embedding": ("gemma3_text", {}, {"use_dora": True, "target_modules": ["embed_tokens", "o_proj"]}),
    "scaled embedding": ("gemma3_text", {}, {"target_modules": ["embed_tokens", *ATTENTION]}),
    "whole scaled embedding": ("gemma3_text", {}, {"modules_to_save": ["embed_tokens"], "target_modules": ATTENTION}),
    "a fused base": ("phi3", {}, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
}


def check(family: str, overrides: dict[str, Any], folder: Path, **options: Any) -> None:
    """The adapter a in folder, another one, and the base, together in one batch, as PEFT computes each alone."""
    save_adapter(tiny_model(family, **overrides), folder / "plain", 1, 0.3, r=3, target_modules=["o_proj"])
    config = config_with(folder, "a", "plain", **options)
    engine = Engine(build_runner(tiny_model(family, **overrides), config), config)
    check_answers(engine, folder, "a", "plain", family=family, **overrides)


def check_adapter(model: torch.nn.Module, folder: Path, oracle: torch.nn.Module) -> None:
    """An engine's answers to all prompts with the adapter a in folder are the oracle's."""
    config = config_with(folder, "a")
    engine = Engine(build_runner(model, config), config)
    for i, prompt in enumerate(PROMPTS):
        start(engine, str(i), prompt, "a")
    found = finish(engine)
    for i, prompt in enumerate(PROMPTS):
        assert len(found[str(i)]) == TOKENS
        assert found[str(i)] == expected(oracle, prompt, found[str(i)])


def compare(found: list[int], oracle: torch.nn.Module, prompt: list[int]) -> None:
    """found are the oracle's greedy tokens, up to a near tie: NF4 GEMMs in fixed point differ by 1e-5 of the norm."""
    with torch.inference_mode():
        scores = oracle(input_ids=torch.tensor([prompt + found[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best, second = scores.topk(2).values.unbind(-1)
    ties = (best - second < 1e-3).nonzero()
    length = int(ties[0]) if len(ties) else len(found)
    assert length > 2
    assert found[:length] == scores.argmax(-1)[:length].tolist()


QUICK = (
    *("DoRA beside biases", "biases of all", "biases of the adapter", "both whole, tied", "both, tied", "tokens"),
    *("DoRA, tied", "DoRA of a scaled embedding", "whole scaled embedding", "a fused base"),
)


@pytest.mark.parametrize("kind", with_rest(KINDS, QUICK))
def test_kinds_of_adapters_equal_peft(kind: str, tmp_path: Path) -> None:
    family, overrides, options = KINDS[kind]
    save_adapter(tiny_model(family, **overrides), tmp_path / "a", 0, 0.3, r=4, lora_alpha=8, **options)
    check(family, overrides, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "skipped", "options"),
    [
        ("llama", ["lm_head"], {"use_dora": True, "target_modules": ALL_PROJECTIONS}),
        ("llama in fp4", ["lm_head"], {"use_dora": True, "target_modules": ALL_PROJECTIONS}),
        # An output layer in NF4, and one that the CPU has in bfloat16.
        ("llama", ["nothing"], {"target_modules": ["lm_head", "embed_tokens", "v_proj"]}),
        ("llama", ["lm_head"], {"target_modules": ["lm_head", "q_proj"]}),
        ("gpt2", ["lm_head"], {"target_modules": ["c_attn", "c_fc"]}),
    ],
)
def test_beside_nf4(model_type: str, skipped: list[str], options: dict[str, Any], tmp_path: Path) -> None:
    settings = {**LLAMA, "hidden_size": 64, "n_inner": 128, "intermediate_size": 128}
    model_type, _, table = model_type.partition(" in ")
    quantization = {"llm_int8_skip_modules": skipped, "bnb_4bit_quant_type": table or "nf4"}
    folder = save_nf4(random_model(config_of(model_type, **settings)), tmp_path / "m", **quantization)
    base = reference_model(folder, tmp_path / "reference")
    options = {"fan_in_fan_out": model_type == "gpt2", **options}
    save_adapter(base, tmp_path / "a", 0, 0.3, r=4, **options)
    config = config_with(tmp_path, "a")
    model = load_model(folder, CPU, torch.float32, silent)
    engine = Engine(build_runner(model, config), config)
    for i, prompt in enumerate(PROMPTS):
        start(engine, f"a {i}", prompt, "a")
        start(engine, f"None {i}", prompt, None)
    found = finish(engine)
    for i, prompt in enumerate(PROMPTS):
        compare(found[f"None {i}"], base, prompt)
    adapted = with_adapter(base, tmp_path / "a")
    for i, prompt in enumerate(PROMPTS):
        compare(found[f"a {i}"], adapted, prompt)


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", "language_model.model."])
def test_on_a_multimodal_base(prefix: str, tmp_path: Path) -> None:
    """With the tower's layers among its targets, which text does not go through, and in the names of other classes."""
    folder = save_nf4(random_model(config_of("gemma3", **CLASSES["gemma3"])), tmp_path / "m")
    base = reference_model(folder, tmp_path / "reference")
    save_adapter(base, tmp_path / "a", 0, 0.3, r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    assert any("vision_tower" in name for name in _weights(tmp_path / "a"))
    oracle = with_adapter(base, tmp_path / "a")
    _rename(tmp_path / "a", r"base_model\.model\.model\.language_model\.", f"base_model.model.{prefix}")
    check_adapter(load_model(folder, CPU, torch.float32, silent), tmp_path, oracle)


def test_dora_in_written_layers(tmp_path: Path) -> None:
    save_adapter(tiny_model("llama"), tmp_path / "a", 0, 0.3, r=4, use_dora=True, target_modules=ALL_PROJECTIONS)
    check("llama", {}, tmp_path, enforce_eager=False)


def _rename(folder: Path, old: str, new: str) -> None:
    change_adapter(folder, lambda tensors: {re.sub(old, new, name): tensor for name, tensor in tensors.items()})


@pytest.mark.parametrize("prefix", ["model.language_model.layers.", "language_model.model.layers.", "layers."])
def test_names_of_other_classes(prefix: str, tmp_path: Path) -> None:
    """Adapters of a multimodal class on its text's class; the other way is the same rule."""
    save_adapter(tiny_model("llama"), tmp_path / "a", 0, 0.3, r=4, target_modules=ALL_PROJECTIONS)
    oracle = with_adapter(tiny_model("llama"), tmp_path / "a")
    _rename(tmp_path / "a", r"model\.model\.layers\.", f"model.{prefix}")
    tower = "base_model.model.model.vision_tower.layers.0.self_attn.q_proj.lora_"
    others = {f"{tower}A.weight": torch.ones(4, 8), f"{tower}B.weight": torch.ones(8, 4)}
    change_adapter(tmp_path / "a", lambda tensors: tensors | others)
    check_adapter(tiny_model("llama"), tmp_path, oracle)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_parts_of_a_fused_projection(tmp_path: Path) -> None:
    """An adapter of q, k and v, gate and up on a base that has each as one: as PEFT with the joined factors."""
    model = tiny_model("phi3")
    save_adapter(model, tmp_path / "a", 0, 0.3, r=4, target_modules=["qkv_proj", "gate_up_proj", "o_proj"])
    parts = {
        "qkv_proj": (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)),
        "gate_up_proj": (("gate_proj", 96), ("up_proj", 96)),
    }
    split = {}
    for name, tensor in _weights(tmp_path / "a").items():
        fused = next((one for one in parts if one in name), None)
        if fused is None:
            split[name] = tensor
            continue
        rows = iter(tensor.split([size for _, size in parts[fused]])) if "lora_B" in name else None
        for part, _ in parts[fused]:
            split[name.replace(fused, part)] = (tensor if rows is None else next(rows)).clone()
    oracle = with_adapter(tiny_model("phi3"), tmp_path / "a")
    change_adapter(tmp_path / "a", lambda _: split)
    check_adapter(tiny_model("phi3"), tmp_path, oracle)


def test_a_fused_projection_on_a_base_that_has_its_parts(tmp_path: Path) -> None:
    save_adapter(tiny_model("llama"), tmp_path / "a", 0, 0.3, r=4, target_modules=["q_proj", "k_proj", "v_proj"])
    tensors, fused = _weights(tmp_path / "a"), {}
    for layer in range(3):
        start_ = f"base_model.model.model.layers.{layer}.self_attn."
        a = tensors[f"{start_}q_proj.lora_A.weight"]
        b = [tensors[f"{start_}{part}_proj.lora_B.weight"] for part in "qkv"]
        for part in "qkv":
            tensors[f"{start_}{part}_proj.lora_A.weight"] = a.clone()
        fused |= {f"{start_}qkv_proj.lora_A.weight": a.clone(), f"{start_}qkv_proj.lora_B.weight": torch.cat(b)}
    change_adapter(tmp_path / "a", lambda _: tensors)
    oracle = with_adapter(tiny_model("llama"), tmp_path / "a")
    change_adapter(tmp_path / "a", lambda _: fused)
    check_adapter(tiny_model("llama"), tmp_path, oracle)


def test_what_graphs_run_equals_what_steps_run(tmp_path: Path) -> None:
    """Masked work, which is always the same, on the CPU."""
    options = {"use_dora": True, "modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ALL_PROJECTIONS}
    save_adapter(tiny_model("llama"), tmp_path / "a", 0, 0.3, r=4, **options)
    save_adapter(tiny_model("llama"), tmp_path / "b", 1, 0.3, r=2, target_modules=["o_proj"])
    config = config_with(tmp_path, "a", "b")
    model = tiny_model("llama")
    build_runner(model, config)
    model.get_decoder().set_attn_implementation("sdpa")
    others = torch.tensor([[False, True], [True, False], [True, True]])
    ids = torch.tensor([[5], [5], [5]])
    oracles = [with_adapter(tiny_model("llama"), tmp_path / "a"), with_adapter(tiny_model("llama"), tmp_path / "b")]
    with torch.inference_mode():
        for row, oracle in enumerate([*oracles, tiny_model("llama")]):
            with adding_masked(others[row : row + 1]):
                found = model(input_ids=ids[row : row + 1], use_cache=False).logits[0]
            torch.testing.assert_close(found, oracle(input_ids=ids[row : row + 1]).logits[0], rtol=1e-4, atol=1e-4)


HEAD = {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}
MAGNITUDES = "base_model.model.model.embed_tokens.lora_magnitude_vector"


@pytest.mark.parametrize(
    ("options", "change", "complaint"),
    [
        ({"modules_to_save": ["input_layernorm"]}, {}, "a whole input_layernorm (modules_to_save) is not served"),
        ({"modules_to_save": ["q_proj"]}, {}, "a whole q_proj (modules_to_save)"),
        ({"target_modules": ["lm_head"]}, {"base_model.model.lm_head.bias": torch.ones(128)},
         "a trained bias of lm_head is not served"),
        ({"target_modules": ["embed_tokens"], "use_dora": True}, {MAGNITUDES: torch.ones(128)},
         "embed_tokens has 128 magnitudes, it must have 64"),
        (HEAD, {"base_model.model.lm_head.weight": torch.ones(130, 64)}, "a vocabulary of another size is not served"),
        (HEAD, {"base_model.model.lm_head.weight": torch.full((128, 64), float("nan"))}, "not finite"),
        ({"trainable_token_indices": [5, 9]}, None, "has 2 trained tokens, trainable_token_indices names 1"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(
    options: dict[str, Any], change: dict[str, torch.Tensor] | None, complaint: str, tmp_path: Path
) -> None:
    save_adapter(tiny_model("llama"), tmp_path / "a", 0, 0.3, **{"r": 4, "target_modules": ["v_proj"], **options})
    if change is None:
        config = tmp_path / "a" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"trainable_token_indices": [5]}))
    else:
        change_adapter(tmp_path / "a", lambda tensors: tensors | change)
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        build_runner(tiny_model("llama"), config_with(tmp_path, "a"))


def test_room_is_made_at_the_start(tmp_path: Path) -> None:
    """An adapter that comes at run time and needs room that none at the start needed is refused."""
    kinds = {"dora": {"use_dora": True}, "head": {"modules_to_save": ["lm_head"]}}
    for name, options in kinds.items():
        save_adapter(tiny_model("llama"), tmp_path / name, 0, 0.3, r=2, target_modules=["v_proj"], **options)
    save_adapter(
        tiny_model("llama"), tmp_path / "embedding", 0, 0.3, r=2, target_modules=["v_proj"],
        modules_to_save=["embed_tokens"],
    )  # fmt: skip
    config = config_with(tmp_path, allow_runtime_lora=True, max_loras=3)
    registry = build_runner(tiny_model("llama"), config).adapters
    assert registry is not None

    for name in (*kinds, "embedding"):
        weights = read_adapter(tmp_path / name, torch.float32)
        with pytest.raises(CheckpointError, match=rf"made at the start: set engine\.lora_extra to \[{name}\]"):
            registry.put(name, weights)
        extra = build_runner(tiny_model("llama"), config.model_copy(update={"lora_extra": (name,)})).adapters
        assert extra is not None
        extra.put(name, weights)
        if name != "dora":
            # What has room keeps it.
            both = build_runner(tiny_model("llama"), config.model_copy(update={"lora_extra": ("dora",)})).adapters
            assert both is not None
            with pytest.raises(CheckpointError, match=rf"lora_extra to \[dora, {name}\]"):
                both.put(name, weights)


def test_trained_tokens_of_a_tied_model_need_room_in_the_output_layer_too(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    save_adapter(model, tmp_path / "a", 0, 0.3, r=2, target_modules=["v_proj"], trainable_token_indices=[5])
    config = config_with(tmp_path, allow_runtime_lora=True, lora_extra=("embedding",))
    registry = build_runner(tiny_model("llama", tie_word_embeddings=True), config).adapters
    assert registry is not None
    with pytest.raises(CheckpointError, match=r"set engine\.lora_extra to \[head, embedding\]"):
        registry.put("a", read_adapter(tmp_path / "a", torch.float32))
