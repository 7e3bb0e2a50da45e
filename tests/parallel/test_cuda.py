"""Several GPUs beside one: the same tokens but for near-ties, log-probabilities that are no further from float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, RepetitionPenaltyLogitsProcessor

from bench.e2e.fidelity import Scored, compare
from server.checkpoint.loading import load_model
from tests.engine.models import tiny_model
from tests.engine.speculation.engines import draft_model, repeating_model
from tests.parallel.cuda_answers import KINDS, TOKENS, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
FOUR_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
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
SPECULATION = ("lookup", "draft")
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
        if family == "repeating":
            save_drafting(model, root / family)
        model.to(torch.bfloat16).save_pretrained(root / family)
    return {family: root / family for family, _ in CASES}


def save_drafting(model: PreTrainedModel, folder: Path) -> None:
    """Save a draft model of model in folder/draft, and a tokenizer for both, which have to have the same."""
    draft_model(model).to(torch.bfloat16).save_pretrained(folder / "draft")
    tokenizer = Tokenizer(WordLevel({f"t{token}": token for token in range(model.config.vocab_size)}, "t0"))
    for path in (folder, folder / "draft"):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


@pytest.fixture(scope="module")
def alone(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answers]:
    """Answers of one GPU, by family, of the families that have been selected."""
    root = tmp_path_factory.mktemp("alone")
    own = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    selected = {call.params.get("family") for call in own if call is not None}
    running = [
        (family, _answering(folders[family], 1, steps, root / family, CUDA_VISIBLE_DEVICES=str(place % 2)))
        for place, (family, steps) in enumerate(CASES)
        if family in selected
    ]
    return {family: _answers(process, root / family) for family, process in running}


# Without peer access NCCL sums everything, through the host's memory.
@pytest.mark.parametrize(
    ("family", "steps", "reach", "gpus"),
    [
        *((*case, True, 2) for case in CASES),
        (*CASES[1], False, 2),
        *(("repeating", steps, True, 2) for steps in SPECULATION),
        *(pytest.param(*case, True, 4, marks=FOUR_GPUS) for case in CASES[:3]),
    ],
)
def test_several_gpus_answer_like_one(
    family: str, steps: str, reach: bool, gpus: int, folders: dict[str, Path], alone: dict[str, Answers], tmp_path: Path
) -> None:
    one, file = alone[family], tmp_path / "several"
    several = _answers(_answering(folders[family], gpus, steps, file, NCCL_P2P_DISABLE=str(int(not reach))), file)
    assert (several["accepted_drafts"] > 0) == (steps in SPECULATION)
    for prompt, vector in one["embeddings"].items():
        alike = torch.cosine_similarity(torch.tensor(vector), torch.tensor(several["embeddings"][prompt]), dim=0)
        assert float(alike) > 0.999, prompt
    one, several = one["answers"], several["answers"]
    assert not any(answer["errors"] for answer in several.values())
    model = load_model(folders[family], torch.device("cuda", 0), torch.bfloat16, lambda *_: None)
    vocabulary = model.config.vocab_size
    # The first comparison converts the model to float32.
    errors = [compare(model, _scored(found, vocabulary))["ours_rms"] for found in (one, several)]
    print(
        f"{family}, {steps}: log-probabilities' error of one GPU {errors[0]:.5f}, of {gpus} {errors[1]:.5f}",
        file=sys.stderr,
    )
    assert errors[1] <= 1.1 * errors[0]
    for kind, options in KINDS.items():
        # How improbable the sampled tokens may be, and how far rounding may move two tokens' logits.
        near = 20 * options["temperature"] + 8 * errors[0]
        shares = []
        for found in (one, several):
            distances = [
                _behind(model, prompt, found[f"{kind} {len(prompt)}"]["tokens"], options.get("repetition_penalty", 1.0))
                for prompt in prompts(kind, vocabulary)
            ]
            shares.append(float((torch.cat(distances) > near).float().mean()))
        # A router's near-tie chooses another expert, which moves logits further.
        assert max(shares) <= (0.05 if family == "qwen3_moe" else 0.0), (kind, shares)


def _scored(found: Answers, vocabulary: int) -> list[Scored]:
    texts = []
    for prompt in prompts("scored", vocabulary):
        answer = found[f"scored {len(prompt)}"]
        tokens = [*prompt, *answer["tokens"]]
        texts.append(Scored(tokens, len(tokens) - len(answer["logprobs"]), answer["logprobs"], 0))
    return texts


@torch.inference_mode()
def _behind(model: PreTrainedModel, prompt: list[int], answer: list[int], penalty: float) -> torch.Tensor:
    """By token of an answer, how far its logit is behind the largest."""
    assert len(answer) == TOKENS
    ids = torch.tensor([prompt + answer], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    penalize = RepetitionPenaltyLogitsProcessor(penalty)
    logits = torch.cat([penalize(ids[:, : len(prompt) + place], row[None]) for place, row in enumerate(logits)])
    return logits.amax(-1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_images_on_two_gpus(name: str, tmp_path: Path) -> None:
    """In bfloat16 the likeliest tokens, or nearly, of transformers' forward."""
    subprocess.run([sys.executable, "-m", "tests.parallel.cuda_images", name, str(tmp_path)], check=True, timeout=300)
