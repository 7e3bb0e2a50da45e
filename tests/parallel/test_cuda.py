"""Two GPUs beside one: the same tokens but for near-ties, log-probabilities that differ by rounding."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.models import tiny_model
from tests.parallel.cuda_answers import KINDS, PROMPTS, TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    # Not a multiple of what vocabularies are padded to.
    "vocab_size": 32013,
    "max_position_embeddings": 4096,
}


def _answers(folder: Path, ranks: int, steps: str) -> dict[str, Any]:
    file = folder / f"{ranks}-{steps}.json"
    command = [sys.executable, "-m", "tests.parallel.cuda_answers", str(folder), str(ranks), steps, str(file)]
    subprocess.run(command, check=True, timeout=240)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("steps", ["eager", "graphs"])
def test_two_gpus_answer_like_one(family: str, steps: str, tmp_path: Path) -> None:
    dim = 128 if family == "qwen3" else 64
    model = tiny_model(family, **SIZES, head_dim=dim)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(0.4)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    one, two = (_answers(tmp_path, ranks, steps) for ranks in (1, 2))
    assert not any(answer["errors"] for answer in two.values())
    for kind in KINDS:
        equal = []
        for length in PROMPTS:
            a, b = (found[f"{kind} {length}"]["tokens"] for found in (one, two))
            assert len(b) == TOKENS
            equal.append(next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), TOKENS))
        # A near-tie ends an answer's agreement early; wrong sums would end all of them at once.
        assert statistics.median(equal) >= TOKENS // 2, (kind, equal)
    differences = [
        abs(x - y)
        for length in PROMPTS
        for x, y in zip(
            one[f"scored {length}"]["logprobs"][: length - 1], two[f"scored {length}"]["logprobs"], strict=False
        )
    ]
    assert statistics.mean(differences) < 0.05
