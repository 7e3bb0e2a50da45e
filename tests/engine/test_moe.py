"""Mixtures of experts through the engine: every family's greedy tokens and log-probabilities are transformers' own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.start import load_runner
from tests.engine.factories import make_request, run_together, tokens
from tests.moe_checkpoints import FAMILIES, VOCABULARY, save_moe, tiny_moe

CONFIG = EngineConfig(
    device="cpu", dtype="float32", block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=32, max_num_seqs=8,
    enforce_eager=True,
)  # fmt: skip
LENGTHS = (1, 5, 41, 17, 30, 2, 9, 12)


def engine_of(folder: Path, config: EngineConfig = CONFIG) -> Engine:
    return Engine(load_runner(folder, config, lambda stage, fraction: None), config)


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """transformers' tokens and their log-probabilities."""
    ids, scores = list(prompt), []
    with torch.inference_mode():
        for _ in range(count):
            logprobs = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float().log_softmax(-1)
            ids.append(int(logprobs.argmax()))
            scores.append(float(logprobs.max()))
    return ids[len(prompt) :], scores


def check(engine: Engine, reference: PreTrainedModel, seed: int = 0) -> None:
    """One request alone, then eight of several lengths at once, give the reference's tokens and log-probabilities."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    wanted = [greedy(reference, prompt, 8) for prompt in prompts]
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 1}
    for group in ([4], range(len(prompts))):
        requests = [make_request(prompts[i], **options) for i in group]
        found = run_together(engine, *requests)
        for index, request in zip(group, requests, strict=True):
            outputs = found[request.request_id]
            assert tokens(outputs) == wanted[index][0]
            scores = [entry.logprob for output in outputs for entry in output.logprobs or ()]
            torch.testing.assert_close(scores, wanted[index][1], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_in_nf4_give_transformers_tokens(family: str, tmp_path: Path) -> None:
    reference = save_moe(tmp_path, tiny_moe(family))
    engine = engine_of(tmp_path)
    check(engine, reference)
