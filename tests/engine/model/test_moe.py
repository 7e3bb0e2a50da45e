"""Mixtures of experts through the engine: every family's greedy tokens and log-probabilities are transformers' own."""

from __future__ import annotations

import copy
import logging
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from nf4_kernels import Weight, cpu
from nf4_kernels.reference import dequantize
from server.checkpoint.base import CheckpointError
from server.checkpoint.experts.module import NF4Experts
from server.checkpoint.loading import load_model
from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.start import load_runner
from tests.adapters import save_adapter, with_adapter
from tests.engine.factories import make_request, run_together, tokens
from tests.marks import with_rest
from tests.moe_checkpoints import (
    FAMILIES,
    VOCABULARY,
    is_projection,
    save_moe,
    separate_experts,
    tiny_moe,
    unchanged,
    unsloth_gpt_oss,
)
from tests.nf4_kernels.weights import FIXED_POINT

CONFIG = EngineConfig(
    device="cpu", dtype="float32", block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=32, max_num_seqs=8, threads=1,
    enforce_eager=True,
)  # fmt: skip
LENGTHS = (1, 5, 41, 17, 30, 2, 9, 12)
RENAMES = {"gpt_oss": unsloth_gpt_oss, "llama4_text": separate_experts}


def experts_in(engine: Engine) -> int:
    """Layers of experts in NF4."""
    return sum(isinstance(module, NF4Experts) for module in engine._runner._paged.model.modules())


def engine_of(folder: Path, config: EngineConfig = CONFIG) -> Engine:
    return Engine(load_runner(folder, config, lambda stage, fraction: None), config)


def off() -> float:
    """Largest distance of log-probabilities from transformers': kernels in fixed point round (docs/adr/0027)."""
    return 4e-3 if cpu.isa() in FIXED_POINT else 2e-4


def check_greedy(model: PreTrainedModel, prompt: list[int], found: list[int], scores: list[float]) -> None:
    """Tokens are transformers' likeliest, but for near ties, and have its log-probabilities."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *found]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.float().log_softmax(-1)
    wanted = logprobs.gather(-1, torch.tensor(found)[:, None])[:, 0]
    assert (logprobs.amax(-1) - wanted).max() <= off()
    torch.testing.assert_close(torch.tensor(scores), wanted, atol=off(), rtol=2e-4)


def check(engine: Engine, reference: PreTrainedModel, seed: int = 0) -> None:
    """One request alone, then eight of several lengths at once, give the reference's tokens and log-probabilities."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 1}
    for group in ([4], range(len(prompts))):
        requests = [make_request(prompts[i], **options) for i in group]
        found = run_together(engine, *requests)
        for index, request in zip(group, requests, strict=True):
            outputs = found[request.request_id]
            scores = [entry.logprob for output in outputs for entry in output.logprobs or ()]
            assert len(scores) == 8
            check_greedy(reference, prompts[index], tokens(outputs), scores)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_nf4_give_transformers_tokens(family: str, tmp_path: Path) -> None:
    """A tensor for each expert and projection, or what the family has in its place, and routers in 16 bit."""
    reference = save_moe(tmp_path, tiny_moe(family), rename=RENAMES.get(family, unchanged))
    engine = engine_of(tmp_path)
    runner = engine._runner
    experts = [module for module in runner._paged.model.modules() if isinstance(module, NF4Experts)]
    assert len(experts) >= 1
    assert runner.nf4_weight_bytes >= sum(module.gate_up.nbytes + module.down.nbytes for module in experts)
    check(engine, reference)


def test_llama_4_scales_no_query_by_its_row_of_a_step(tmp_path: Path) -> None:
    """transformers scales by the place in the forward pass, which here has tokens of all sequences."""
    scaled = {"no_rope_layers": [1, 0], "floor_scale": 60, "attn_scale": 0.5}
    reference = save_moe(tmp_path, tiny_moe("llama4_text", **scaled), rename=separate_experts)
    assert reference.model.layers[1].self_attn.attn_temperature_tuning
    engine = engine_of(tmp_path, CONFIG.model_copy(update={"max_num_batched_tokens": 256}))
    assert engine._runner.limits.max_model_len == 59
    check(engine, reference)


def in_nf4_with_routers(name: str) -> bool:
    return is_projection(name) or name.endswith((".gate.weight", ".router.linear.weight"))


@pytest.mark.parametrize("family", with_rest(["qwen3_moe", "mixtral", "phimoe", "gpt_oss"], ["phimoe", "gpt_oss"]))
def test_routers_may_be_in_nf4(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = save_moe(tmp_path, tiny_moe(family), in_nf4_with_routers, RENAMES.get(family, unchanged))
    with caplog.at_level(logging.INFO):
        engine = engine_of(tmp_path)
    assert "2 layers of 8 experts in NF4, router in float32, expanded from NF4" in caplog.text
    check(engine, reference)


@pytest.mark.parametrize("family", with_rest(["qwen3_moe", "granitemoe", "deepseek_v3"], ["granitemoe"]))
@pytest.mark.parametrize("nested", [False, True])
def test_experts_may_be_one_tensor_in_nf4(family: str, nested: bool, tmp_path: Path) -> None:
    reference = save_moe(tmp_path, tiny_moe(family), stacked=True, nested=nested)
    engine = engine_of(tmp_path)
    assert experts_in(engine) >= 1
    check(engine, reference)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_that_stayed_16_bit_beside_nf4_are_served_as_they_are(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files as transformers 5 saves them: it quantizes linear layers only."""
    reference = save_moe(tmp_path, tiny_moe(family), in_nf4=lambda name: "self_attn" in name and is_projection(name))
    with caplog.at_level(logging.INFO):
        engine = engine_of(tmp_path)
    assert experts_in(engine) == 0
    assert "2 layers of 8 experts in float32, router in float32" in caplog.text
    check(engine, reference)


@pytest.mark.parametrize("family", with_rest(FAMILIES, ["qwen3_moe", "gpt_oss", "llama4_text"]))
def test_a_16_bit_checkpoints_experts_are_quantized(family: str, tmp_path: Path) -> None:
    model = tiny_moe(family)
    save_moe(tmp_path, model, in_nf4=lambda name: False)
    reference = expanded(load_model(tmp_path, torch.device("cpu"), torch.float32, lambda *_: None), model)
    engine = engine_of(tmp_path)
    assert experts_in(engine) >= 1
    check(engine, reference)


def expanded(loaded: PreTrainedModel, model: PreTrainedModel) -> PreTrainedModel:
    """model with the weights that loaded has in NF4, which are model's but for rounding."""
    reference = copy.deepcopy(model)
    for name, module in loaded.named_modules():
        if isinstance(module, Linear4bit):
            weight = Weight.from_quant_state(module.weight, module.weight.quant_state)
            _replace(reference.get_submodule(name).weight, dequantize(weight, torch.float32))
        elif isinstance(module, NF4Experts):
            theirs: Any = reference.get_submodule(name)
            gate_up, down = (dequantize(w.weight, torch.float32) for w in (module.gate_up, module.down))
            if not getattr(theirs, "is_concatenated", True):
                gate_up = gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            if theirs.gate_up_proj.shape != gate_up.shape or getattr(theirs, "is_transposed", False):
                gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
            _replace(theirs.gate_up_proj, gate_up)
            _replace(theirs.down_proj, down)
    return reference


def _replace(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    # Half of NF4's widest gap between neighbouring codes, of the largest weight.
    assert (values - parameter).abs().max() < 0.16 * parameter.abs().max()
    parameter.copy_(values)


@pytest.mark.parametrize(("targets", "served"), [(["q_proj", "o_proj"], True), (["up_proj"], False)])
def test_adapters_of_attention_work_and_those_of_experts_are_refused_by_name(
    targets: list[str], served: bool, tmp_path: Path
) -> None:
    """Adapters of experts one by one, as older versions of PEFT and transformers name them."""
    reference = save_moe(tmp_path, tiny_moe("qwen3_moe"))
    adapter = tmp_path / "adapter"
    save_adapter(reference, adapter, seed=1, r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"])
    if not served:
        factors = load_file(adapter / "adapter_model.safetensors")
        renamed = {
            re.sub(r"self_attn\.\w+", f"mlp.experts.3.{targets[0]}", name): tensor for name, tensor in factors.items()
        }
        save_file(renamed, adapter / "adapter_model.safetensors")
    config = CONFIG.model_copy(update={"lora_modules": [LoraModule(name="own", path=adapter)]})
    if not served:
        with pytest.raises(CheckpointError, match=r"adapters of experts are not served: .*experts\.3\.up_proj"):
            engine_of(tmp_path, config)
        return
    engine = engine_of(tmp_path, config)
    prompt = [5, 9, 60, 7]
    request = make_request(prompt, max_tokens=8, ignore_eos=True, logprobs=1)
    request = msgspec.structs.replace(request, adapter="own")
    outputs = run_together(engine, request)[request.request_id]
    scores = [entry.logprob for output in outputs for entry in output.logprobs or ()]
    check_greedy(with_adapter(reference, adapter), prompt, tokens(outputs), scores)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_written_layers_of_experts_give_transformers_tokens(family: str, tmp_path: Path) -> None:
    reference = save_moe(tmp_path, tiny_moe(family), rename=RENAMES.get(family, unchanged))
    engine = engine_of(tmp_path, CONFIG.model_copy(update={"enforce_eager": False}))
    assert all("forward" in vars(layer) for layer in engine._runner._paged.model.get_decoder().layers)
    check(engine, reference)
