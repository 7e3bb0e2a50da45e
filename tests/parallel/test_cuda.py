"""Two GPUs beside one: the same tokens but for near-ties, log-probabilities that are no further from float32."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.e2e.fidelity import Scored, compare
from server.checkpoint.loading import load_model
from tests.engine.models import tiny_model
from tests.engine.test_speculation import repeating_model
from tests.parallel.cuda_answers import KINDS, PROMPTS, TOKENS, prompts

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
    "head_dim": 128,
    # Not a multiple of what vocabularies are padded to.
    "vocab_size": 32013,
    "max_position_embeddings": 4096,
}
MIXTURE = {"moe_intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 4}
CASES = (("llama", "eager"), ("qwen3", "graphs"), ("qwen3_moe", "graphs"), ("repeating", "graphs"))
Answers = dict[str, Any]


def _answering(folder: Path, ranks: int, steps: str, file: Path, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.parallel.cuda_answers", str(folder), str(ranks), steps, str(file)]
    return subprocess.Popen(command, env={**os.environ, **environment})


def _answers(process: subprocess.Popen[bytes], file: Path) -> Answers:
    try:
        assert process.wait(timeout=240) == 0
    finally:
        process.kill()
        process.wait()
    found: Answers = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family, a small random model in 16 bit."""
    root = tmp_path_factory.mktemp("models")
    for family, _ in CASES:
        if family == "repeating":
            model = repeating_model(**{name: size for name, size in SIZES.items() if name != "vocab_size"})
        else:
            model = tiny_model(family, **SIZES, **(MIXTURE if family == "qwen3_moe" else {}))
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(0.4)
        model.to(torch.bfloat16).save_pretrained(root / family)
    return {family: root / family for family, _ in CASES}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    """By family, what one GPU answers."""
    root = tmp_path_factory.mktemp("alone")
    running = [
        (family, _answering(folders[family], 1, steps, root / family, CUDA_VISIBLE_DEVICES=str(place % 2)))
        for place, (family, steps) in enumerate(CASES)
    ]
    return {family: _answers(process, root / family) for family, process in running}


# Without peer access NCCL sums everything, through the host's memory.
@pytest.mark.parametrize(
    ("family", "steps", "reach"),
    [*((*case, True) for case in CASES), (*CASES[1], False), ("repeating", "lookup", True)],
)
def test_two_gpus_answer_like_one(
    family: str, steps: str, reach: bool, folders: dict[str, Path], alone: dict[str, Answers], tmp_path: Path
) -> None:
    one, file = alone[family], tmp_path / "two"
    two = _answers(_answering(folders[family], 2, steps, file, NCCL_P2P_DISABLE=str(int(not reach))), file)
    assert (two["accepted_guesses"] > 0) == (steps == "lookup")
    one, two = one["answers"], two["answers"]
    assert not any(answer["errors"] for answer in two.values())
    for kind in KINDS:
        equal = []
        for length in PROMPTS:
            a, b = (found[f"{kind} {length}"]["tokens"] for found in (one, two))
            assert len(b) == TOKENS
            equal.append(next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), TOKENS))
        # A near-tie ends an answer's agreement early, where tokens are sampled more often; wrong sums would end all at once.
        least = TOKENS // 8 if KINDS[kind]["temperature"] else TOKENS // 2
        assert statistics.median(equal) >= least, (kind, equal)
    errors = [_error(folders[family], found) for found in (one, two)]
    print(
        f"{family}, {steps}: log-probabilities' error of one GPU {errors[0]:.5f}, of two {errors[1]:.5f}",
        file=sys.stderr,
    )
    assert errors[1] <= 1.1 * errors[0]


def _error(folder: Path, found: Answers) -> float:
    """Root mean square error of the scored answers' log-probabilities, beside float32 on the same NF4 weights."""
    model = load_model(folder, torch.device("cuda", 0), torch.bfloat16, lambda *_: None)
    texts = []
    for prompt in prompts("scored", model.config.vocab_size):
        answer = found[f"scored {len(prompt)}"]
        tokens = [*prompt, *answer["tokens"]]
        texts.append(Scored(tokens, len(tokens) - len(answer["logprobs"]), answer["logprobs"], 0))
    return compare(model, texts)["ours_rms"]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_images_on_two_gpus(name: str, tmp_path: Path) -> None:
    """In bfloat16 the likeliest tokens, or nearly, of transformers' forward."""
    subprocess.run([sys.executable, "-m", "tests.parallel.cuda_images", name, str(tmp_path)], check=True, timeout=300)
