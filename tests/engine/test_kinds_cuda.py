"""On a GPU: adapters with DoRA and tables in decode graphs; families whose layers are transformers' own in graphs."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from server.checkpoint.classes import leave_out_towers
from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.types import GenerateRequest, SamplingParams
from tests.adapters import ALL_PROJECTIONS, save_adapter, with_adapter
from tests.checkpoint.layouts import config_of
from tests.checkpoint.multimodal import CLASSES
from tests.engine.greedy_answers import VOCABULARY, small
from tests.engine.models import tiny_model

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
NEAR_TIE = 0.1
TOKENS = 24
ADAPTERS: dict[str, dict[str, Any]] = {
    "dora": {"r": 16, "use_dora": True, "target_modules": ALL_PROJECTIONS},
    "whole": {"r": 8, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"r": 8, "target_modules": ["o_proj"], "trainable_token_indices": [5, 9, 60]},
}
WIDE = {"hidden_size": 256, "head_dim": 64, "n_embd": 256, "n_head": 4, "num_attention_heads": 4}


def test_kinds_of_adapters_in_decode_graphs(tmp_path: Path) -> None:
    check_adapters(tmp_path, GPU, torch.bfloat16)


@pytest.mark.parametrize("family", ["gpt2", "gpt_bigcode", "gemma3n_text", "gemma4_text"])
def test_families_without_written_layers(family: str) -> None:
    model = tiny_model(family, **{**WIDE, "per_layer_config": {}} if family == "gemma4_text" else WIDE)
    check_model(model, GPU, torch.bfloat16)


def test_heads_of_256_and_of_512() -> None:
    check_model(long_heads(), GPU, torch.bfloat16)


def long_heads() -> nn.Module:
    """Gemma 4 with layers of its published sizes' heads, and queries so short that rounding decides little.

    Random ones of 512 elements give nearly all weight to one key, and bfloat16 alone moves logits by half their deviation.
    """
    longer = {layer: {"head_dim": 512, "num_key_value_heads": 1} for layer in ("01", "03")}
    own = {"head_dim": 256, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "per_layer_config": longer}
    model = tiny_model("gemma4_text", **WIDE | own)
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.data *= 2 / parameter.shape[0] ** 0.5
    return model


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "mllama", "gemma3"])
def test_text_of_multimodal_classes(model_type: str) -> None:
    check_model(multimodal(model_type), GPU, torch.bfloat16)


def multimodal(model_type: str) -> nn.Module:
    """A random multimodal model without its towers; weights large enough that attention matters."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(model_type, **CLASSES[model_type]), dtype=torch.float32)
    leave_out_towers(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return model.eval().requires_grad_(False)


def check_model(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Every token of the engine is the best one, or nearly, of transformers' forward over the answer."""
    model = model.to(device, dtype)
    reference = copy.deepcopy(model)
    config = EngineConfig(device=device.type, max_num_seqs=8, max_model_len=128, kv_cache_bytes=2**24)
    engine = Engine(build_runner(model, config), config)
    answers = answers_of(engine, 120, [None])
    for prompt, answer in answers[None]:
        check_answer(reference, prompt, answer, device, "base")


def check_adapters(folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """The same with adapters of several kinds in one batch, against PEFT."""

    def fresh() -> Any:
        return small("qwen3-8b", folder, device, dtype, num_hidden_layers=2)

    for seed, (name, options) in enumerate(ADAPTERS.items()):
        save_adapter(fresh(), folder / name, seed, 0.05, **options)
    modules = tuple(LoraModule(name=name, path=folder / name) for name in ADAPTERS)
    config = EngineConfig(
        device=device.type, max_num_seqs=16, max_num_batched_tokens=100, max_model_len=512, kv_cache_bytes=2**26,
        lora_modules=modules,
    )  # fmt: skip
    engine = Engine(build_runner(fresh(), config), config)
    names = [None, *ADAPTERS]
    answers = answers_of(engine, VOCABULARY, names)
    for name in names:
        oracle = fresh() if name is None else with_adapter(fresh(), folder / name)
        for prompt, answer in answers[name]:
            check_answer(oracle, prompt, answer, device, name)


def answers_of(
    engine: Engine, vocabulary: int, names: list[str | None]
) -> dict[str | None, list[tuple[list[int], list[int]]]]:
    """By adapter, prompts and greedy answers, all of one batch."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, vocabulary) for _ in range(n)] for n in (5, 60, 33, 1)]
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        for name in names:
            sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            engine.add(GenerateRequest(f"{name}/{index}", prompt, sampling, name))
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    return {name: [(prompt, found[f"{name}/{i}"]) for i, prompt in enumerate(prompts)] for name in names}


def check_answer(oracle: Any, prompt: list[int], answer: list[int], device: torch.device, name: object) -> None:
    chosen = torch.tensor(answer, device=device)
    assert len(chosen) == TOKENS
    with torch.inference_mode():
        logits = oracle(input_ids=torch.tensor([prompt + answer], device=device), use_cache=False).logits[0]
    expected = logits[len(prompt) - 1 : -1].float()
    behind = expected.amax(-1) - expected.gather(1, chosen.unsqueeze(1)).squeeze(1)
    assert behind.max() <= NEAR_TIE * max(1.0, float(expected.std())), (name, float(behind.max()))
    assert (behind == 0).float().mean() > 0.8, name
