"""LoRA adapters of models with layers that keep states: what PEFT computes with each, for several in one batch."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nf4_kernels import cpu
from server.checkpoint.loading import load_model
from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.types import GenerateRequest, LoadAdapter, RequestOutput
from tests.adapters import save_adapter, with_adapter
from tests.checkpoint.layouts import CPU, reference_model, save_nf4, silent
from tests.checkpoint.test_hybrids import SKIPPED, made
from tests.engine.factories import make_request
from tests.engine.scored import check_outputs
from tests.moe_checkpoints import save_moe
from tests.nf4_kernels.weights import FIXED_POINT

CONFIG = EngineConfig(
    device="cpu", kv_cache_bytes=2**20, block_size=4, max_num_batched_tokens=24, max_num_seqs=5,
    state_snapshot_tokens=16, state_snapshot_bytes=2**20,
)  # fmt: skip
PROMPTS = [[5, 9, 3, 17, 4, 44, 23], [60, 61], list(range(3, 60))]
# PEFT refuses out_proj of Nemotron-H's mixers.
_MIXERS = r".*\.((self_attn|linear_attn|conv|mamba)\.\w*_proj\w*|mixer\.([qkvo]|in)_proj)"
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "target_modules": "all-linear"},
    # The projections of layers with states alone.
    "states": {"r": 2, "target_modules": r".*\.((linear_attn|conv|mamba)\.\w*(in|out)_proj\w*|mixer\.in_proj)"},
}
TOKENS = 6


def save_adapters(model: PreTrainedModel, folder: Path, size: float = 0.2) -> tuple[LoraModule, ...]:
    """Save ADAPTERS of a model, each in a folder of its name. Mixtures' MLPs are left alone."""
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        has_experts = any("experts" in module for module, _ in model.named_modules())
        targets = {"target_modules": _MIXERS} if has_experts and name == "all" else {}
        save_adapter(model, folder / name, seed, size, **options | targets)
    return tuple(LoraModule(name=name, path=folder / name) for name in ADAPTERS)


def run(engine: Engine) -> dict[str, list[RequestOutput]]:
    """Answers to every prompt from the base and from each adapter, all in one batch, neighbours with different ones."""
    outputs: dict[str, list[RequestOutput]] = {}
    for index, prompt in enumerate(PROMPTS):
        for name in (None, *ADAPTERS):
            made_request = make_request(prompt, f"{name} {index}", max_tokens=TOKENS, ignore_eos=True, logprobs=0)
            engine.add(GenerateRequest(made_request.request_id, prompt, made_request.sampling, name))
            outputs[made_request.request_id] = []
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def check_peft(outputs: dict[str, list[RequestOutput]], base: PreTrainedModel, folder: Path, tolerance: float) -> None:
    """All outputs are those of PEFT with each adapter alone, and the adapters matter."""
    for name in (None, *ADAPTERS):
        oracle = base if name is None else with_adapter(copy.deepcopy(base), folder / name)
        for index, prompt in enumerate(PROMPTS):
            check_outputs(oracle, prompt, outputs[f"{name} {index}"], tolerance)
    for index in range(len(PROMPTS)):
        scores = {outputs[f"{name} {index}"][0].logprobs[0].logprob for name in (None, *ADAPTERS)}  # type: ignore[index]
        assert len(scores) == len(ADAPTERS) + 1


@functools.cache
def plain_model(model_type: str) -> PreTrainedModel:
    return made(model_type).float()


@pytest.mark.parametrize(
    ("model_type", "eager"),
    [
        ("qwen3_5_text", False),
        ("lfm2", False),
        *((each, True) for each in ("qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid", "nemotron_h")),
    ],
)
def test_adapters_and_base_in_one_batch_equal_peft(model_type: str, eager: bool, tmp_path: Path) -> None:
    """Twice: the second time the prompts' beginnings are found, with the states that each adapter left."""
    config = CONFIG.model_copy(
        update={"enforce_eager": eager, "lora_modules": save_adapters(plain_model(model_type), tmp_path)}
    )
    engine = Engine(build_runner(copy.deepcopy(plain_model(model_type)), config), config)
    first = run(engine)
    hits = engine.stats().prefix_cache_hits
    again = run(engine)
    assert engine.stats().prefix_cache_hits - hits > 3 * 40
    for name, outputs in first.items():
        assert [o.new_token_ids for o in again[name]] == [o.new_token_ids for o in outputs], name
    check_peft(first, plain_model(model_type), tmp_path, 3e-4)


def quantized(model_type: str, folder: Path) -> tuple[Path, PreTrainedModel]:
    """A checkpoint in NF4, and transformers' own model of the same numbers in float32."""
    if model_type == "qwen3_5":
        saved = save_nf4(made(model_type), folder / "model", llm_int8_skip_modules=SKIPPED)
    elif model_type == "lfm2":
        saved = save_nf4(made(model_type), folder / "model")
    else:
        # All experts: of two that are nearly as likely, rounding would choose another one.
        every = made(model_type, num_experts_per_tok=8).float()
        return folder / "model", save_moe(folder / "model", every)
    return saved, reference_model(saved, folder / "expanded")


@pytest.mark.rest
@pytest.mark.parametrize("model_type", ["qwen3_5", "lfm2", "qwen3_5_moe_text", "qwen3_next", "lfm2_moe"])
def test_adapters_of_quantized_checkpoints(model_type: str, tmp_path: Path) -> None:
    folder, base = quantized(model_type, tmp_path)
    modules = save_adapters(base, tmp_path, 0.1)
    config = CONFIG.model_copy(update={"lora_modules": modules})
    engine = Engine(build_runner(load_model(folder, CPU, torch.float32, silent), config), config)
    # Kernels in fixed point round, and states carry that on.
    check_peft(run(engine), base, tmp_path, 2e-2 if cpu.isa() in FIXED_POINT else 1e-3)


@pytest.mark.rest
def test_adapters_that_come_while_the_engine_runs(tmp_path: Path) -> None:
    """Then every projection has room for them, the narrow ones of each head among them."""
    model = plain_model("qwen3_5_text")
    save_adapters(model, tmp_path)
    config = CONFIG.model_copy(update={"allow_runtime_lora": True, "max_loras": 2, "max_lora_rank": 4})
    engine = Engine(build_runner(copy.deepcopy(model), config), config)
    adapters = engine._runner.adapters
    assert adapters is not None
    for module in (LoraModule(name=name, path=tmp_path / name) for name in ADAPTERS):
        adapters.read(LoadAdapter(module.name, str(module.path)))
        while not (results := engine.settle_adapters()):
            pass
        assert [result.error for result in results] == [None]
    check_peft(run(engine), model, tmp_path, 3e-4)
