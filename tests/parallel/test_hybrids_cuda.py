"""On two GPUs: models with layers that keep states answer as on one, and no further from float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import PreTrainedModel

from nf4_kernels import reference
from nf4_kernels.format import Weight
from server.checkpoint.loading import load_model
from tests.engine.models import tiny_model
from tests.parallel.cuda_answers import KINDS, PROMPTS, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SIZES: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 32013, "max_position_embeddings": 4096,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "head_dim": 128,
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
    },
    "lfm2": {},
}
CPU = torch.device("cpu")


def answers(folder: Path, ranks: int, steps: str, file: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.parallel.cuda_answers", str(folder), str(ranks), steps, str(file)]
    subprocess.run(command, check=True, timeout=280, env={**os.environ})
    found: dict[str, Any] = json.loads(file.read_text())["answers"]
    return found


def oracle_of(folder: Path) -> PreTrainedModel:
    """transformers' own forward on the CPU in float32, where it calls no other kernels, with the same quantized weights."""
    model = load_model(folder, CPU, torch.float32, lambda *_: None)
    for name, linear in [*model.named_modules()]:
        if isinstance(linear, Linear4bit):
            plain = nn.Linear(linear.in_features, linear.out_features, bias=False)
            weight = Weight.from_quant_state(linear.weight, linear.weight.quant_state)
            plain.weight.data = reference.dequantize(weight, torch.float32)
            model.set_submodule(name, plain)
    return model


@torch.inference_mode()
def errors_of(model: PreTrainedModel, found: dict[str, Any]) -> tuple[float, float]:
    """The root mean square error of the scored tokens' log-probabilities, and the largest lag of a greedy token's logit."""
    differences, behind = [], []
    for prompt in prompts("scored", SIZES["vocab_size"]):
        answer = found[f"scored {len(prompt)}"]
        ids = torch.tensor([[*prompt, *answer["tokens"]]])
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        scored = torch.tensor(answer["logprobs"])
        differences.append(scored - expected[-len(scored) :])
        own = logits[len(prompt) - 1 :]
        behind.append(own.amax(-1) - own.gather(-1, torch.tensor(answer["tokens"])[:, None])[:, 0])
    return float(torch.cat(differences).square().mean().sqrt()), float(torch.cat(behind).max())


@pytest.mark.parametrize("steps", ["graphs", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_gpus_answer_as_one(family: str, steps: str, tmp_path: Path) -> None:
    model = tiny_model(family, **SIZES, **FAMILIES[family])
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(0.4)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    one, two = (answers(tmp_path / "model", ranks, steps, tmp_path / str(ranks)) for ranks in (1, 2))
    for found in (one, two):
        assert len(found) == len(KINDS) * len(PROMPTS)
        assert not any(answer["errors"] for answer in found.values())
    oracle = oracle_of(tmp_path / "model")
    (error, _), (of_two, lag) = errors_of(oracle, one), errors_of(oracle, two)
    print(f"{family}, {steps}: log-probabilities' error of one GPU {error:.5f}, of two {of_two:.5f}", file=sys.stderr)
    assert of_two <= 1.2 * error
    assert lag <= 8 * error
