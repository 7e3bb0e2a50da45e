"""Several GPUs: log-probabilities no further from float32 than those of transformers in 16 bits, and likely tokens."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, RepetitionPenaltyLogitsProcessor

from bench.e2e.fidelity import make_exact
from server.checkpoint.loading import load_model
from tests.engine.hybrids import without_other_kernels
from tests.engine.models import HYBRIDS, tiny_model
from tests.engine.speculation.engines import draft_model, repeating_model
from tests.parallel.cuda_answers import KINDS, TOKENS, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
GPU = torch.device("cuda", 0)
SIZES: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4,
    "num_hidden_layers": 4, "head_dim": 128, "max_position_embeddings": 4096,
}  # fmt: skip
_QWEN3_5: dict[str, Any] = {
    "vocab_size": 8003,
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
}
FAMILIES: dict[str, dict[str, Any]] = {
    # Not a multiple of what vocabularies are padded to.
    "qwen3": {"vocab_size": 32013},
    "qwen3_moe": {"vocab_size": 8003, "moe_intermediate_size": 768, "num_experts": 16, "num_experts_per_tok": 4},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": {
        **_QWEN3_5,
        "layer_types": HYBRIDS["qwen3_5_text"]["layer_types"],
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "lfm2": {"vocab_size": 8003, "num_hidden_layers": 5},
}
CASES: dict[str, tuple[str, str, int]] = {
    # NCCL sums everything, through the host's memory.
    "qwen3 without peer access": ("qwen3", "graphs", 2),
    "qwen3_moe": ("qwen3_moe", "graphs", 2),
    "qwen3_5_text": ("qwen3_5_text", "graphs", 2),
    "qwen3_5_moe": ("qwen3_5_moe_text", "graphs", 2),
    "lfm2 eager": ("lfm2", "eager", 2),
    "draft": ("repeating", "draft", 2),
    "images": ("gemma3", "images", 2),
    "qwen3 on four": ("qwen3", "graphs", 4),
    "qwen3_moe on four": ("qwen3_moe", "graphs", 4),
}
"""By name: family, steps of cuda_answers.py, and GPUs."""
Running = dict[str, tuple[subprocess.Popen[bytes], Path]]


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The processes of all selected cases and what they write: they import at once, and compute two at a time."""
    root = tmp_path_factory.mktemp("models")
    found: Running = {}
    turns = [(root / f"turn-{index}").open("w") for index in (0, 1)]
    for turn in turns:
        fcntl.flock(turn, fcntl.LOCK_EX)
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    for index, name in enumerate(str(item.callspec.params["name"]) for item in items):
        family, steps, gpus = CASES[name]
        if gpus <= torch.cuda.device_count():
            file = root / f"{name}.json"
            arguments = [root / family, str(gpus), steps, file, turns[index % 2].name]
            environment = {**os.environ, "NCCL_P2P_DISABLE": str(int("without peer access" in name))}
            command = [sys.executable, "-m", "tests.parallel.cuda_answers", *arguments]
            found[name] = subprocess.Popen(command, env=environment), file
    try:
        for family in {CASES[name][0] for name in found}:
            _save(family, root / family)
        for turn in turns:
            turn.close()
        yield found
    finally:
        for process, _ in found.values():
            process.kill()
            process.wait()


def _save(family: str, folder: Path) -> None:
    """Save a small random model in 16 bits; gemma3's is made by its own check."""
    folder.mkdir()
    if family == "gemma3":
        return
    with GPU:
        if family == "repeating":
            model = repeating_model(**SIZES)
            _save_drafting(model, folder)
        else:
            model = tiny_model(family, **SIZES | FAMILIES[family])
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(0.4)
    model.to(torch.bfloat16).save_pretrained(folder)


def _save_drafting(model: PreTrainedModel, folder: Path) -> None:
    """Save a draft model of model in folder/draft, and a tokenizer for both, which have to have the same."""
    draft_model(model).to(torch.bfloat16).save_pretrained(folder / "draft")
    tokenizer = Tokenizer(WordLevel({f"t{token}": token for token in range(model.config.vocab_size)}, "t0"))
    for path in (folder, folder / "draft"):
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


@pytest.mark.parametrize("name", CASES)
def test_several_gpus_answer_like_transformers(name: str, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    family, steps, gpus = CASES[name]
    if name not in running:
        pytest.skip(f"needs {gpus} GPUs")
    process, file = running[name]
    assert process.wait(timeout=300) == 0
    if steps == "images":
        return
    found = json.loads(file.read_text())
    assert (found["accepted_drafts"] > 0) == (steps == "draft")
    if family.startswith("qwen3_5") or family == "lfm2":
        without_other_kernels(family, monkeypatch)
    check(found, load_model(file.parent / family, GPU, torch.bfloat16, lambda *_: None), name)


@torch.inference_mode()
def check(found: dict[str, Any], model: PreTrainedModel, name: str) -> None:
    """Compare answers with model's, which is made exact, that is float32 with the same NF4 weights.

    A router's near-tie chooses another expert by rounding, which moves what follows by more than rounding does: of a
    mixture's embeddings half may be others, of its tokens a quarter.
    """
    is_mixture, vocabulary = "moe" in name, model.config.vocab_size
    embedded = prompts("embedded", vocabulary)
    answers = found["answers"]
    assert not any(answer["errors"] for answer in answers.values())
    texts = [(prompt, answers[f"scored {len(prompt)}"]) for prompt in prompts("scored", vocabulary)]
    theirs = torch.cat([_logprobs(model, prompt + answer["tokens"]) for prompt, answer in texts])
    their_states = _states(model, embedded)
    make_exact(model)
    exact = torch.cat([_logprobs(model, prompt + answer["tokens"]) for prompt, answer in texts])
    ours = torch.tensor([value for _, answer in texts for value in answer["logprobs"]], device=model.device)
    error, allowed = (float((values - exact).square().mean().sqrt()) for values in (ours, theirs))
    print(f"{name}: error of log-probabilities {error:.5f}, transformers' in 16 bits {allowed:.5f}", file=sys.stderr)
    assert error <= 1.25 * allowed
    our_states = torch.tensor([*found["embeddings"].values()], device=model.device)
    states = _states(model, embedded)
    distances = [1 - torch.cosine_similarity(each, states, dim=1) for each in (our_states, their_states)]
    print(f"{name}: distances of embeddings {[each.tolist() for each in distances]}", file=sys.stderr)
    distance, allowed_distance = (float(each.median() if is_mixture else each.mean()) for each in distances)
    assert distance <= 4 * allowed_distance
    for kind, options in KINDS.items():
        # How improbable the sampled tokens may be, and how far rounding may move two tokens' logits.
        near = 20 * options["temperature"] + 8 * allowed
        penalty = options.get("repetition_penalty", 1.0)
        lags = [_lags(model, p, answers[f"{kind} {len(p)}"]["tokens"], penalty) for p in prompts(kind, vocabulary)]
        share = float((torch.cat(lags) > near).float().mean())
        assert share <= (0.25 if is_mixture else 0.0), (kind, share)


def _ids(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    return torch.tensor([tokens], device=model.device)


def _states(model: PreTrainedModel, texts: list[list[int]]) -> torch.Tensor:
    """float32 [texts, hidden]: the last tokens'."""
    found = [model.base_model(_ids(model, text), use_cache=False).last_hidden_state[0, -1] for text in texts]
    return torch.stack(found).float()


def _logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """float32 [tokens - 1]."""
    ids = _ids(model, tokens)
    scores = model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None])[:, 0]


def _lags(model: PreTrainedModel, prompt: list[int], answer: list[int], penalty: float) -> torch.Tensor:
    """By token of an answer, how far its logit is behind the largest."""
    assert len(answer) == TOKENS
    ids = _ids(model, prompt + answer)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    penalize = RepetitionPenaltyLogitsProcessor(penalty)
    logits = torch.cat([penalize(ids[:, : len(prompt) + place], row[None]) for place, row in enumerate(logits)])
    return logits.amax(-1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
