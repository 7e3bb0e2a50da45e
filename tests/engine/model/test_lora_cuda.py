"""Adapters on a GPU: decode graphs with and without them, chunks of prompts, an adapter loaded after the capture."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from server.checkpoint.lora import read_adapter
from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.types import GenerateRequest, SamplingParams
from tests.adapters import ALL_PROJECTIONS, save_adapter, with_adapter
from tests.engine.greedy_answers import VOCABULARY, behind_best, small

pytestmark = pytest.mark.gpu

# PEFT keeps an adapter's factors in float32, the engine in the model's bfloat16.
NEAR_TIE = 0.1
TOKENS = 40
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 16, "lora_alpha": 16, "target_modules": ALL_PROJECTIONS},
    "few": {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "down_proj"]},
}


def test_greedy_answers_are_the_best_tokens_of_peft(tmp_path: Path) -> None:
    check(tmp_path, torch.device("cuda", 0), torch.bfloat16)


def check(folder: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Adapters and base in one batch; every token is the best one, or nearly, of PEFT's forward over the answer."""
    reference, model = (small("qwen3-8b", folder, device, dtype, num_hidden_layers=3) for _ in range(2))
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        save_adapter(reference, folder / name, seed, 0.05, **options)
    config = EngineConfig(
        device=device.type,
        max_num_seqs=16,
        max_num_batched_tokens=100,
        max_model_len=512,
        kv_cache_bytes=2**26,
        lora_modules=(LoraModule(name="all", path=folder / "all"),),
        allow_runtime_lora=True,
    )
    runner = build_runner(model, config)
    assert runner.adapters is not None
    runner.adapters.put("few", read_adapter(folder / "few", dtype))
    engine = Engine(runner, config)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in (5, 90, 33, 1)]
    answers: dict[tuple[str | None, int], list[int]] = {}
    for index, prompt in enumerate(prompts):
        for name in (None, *ADAPTERS):
            sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            engine.add(GenerateRequest(f"{name}/{index}", prompt, sampling, name))
            answers[name, index] = []
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            name, index = output.request_id.split("/")
            answers[None if name == "None" else name, int(index)] += output.new_token_ids
    for name in (None, *ADAPTERS):
        oracle = reference if name is None else with_adapter(reference, folder / name)
        for index, prompt in enumerate(prompts):
            assert len(answers[name, index]) == TOKENS
            behind = behind_best(oracle, prompt, answers[name, index])
            assert behind.max() <= NEAR_TIE, (name, index)
            assert (behind == 0).float().mean() > 0.85, (name, index)
        if name is not None:
            reference = oracle.unload()
    assert all(answers[None, i] != answers["all", i] != answers["few", i] for i in range(len(prompts)))
