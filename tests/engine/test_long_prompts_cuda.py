"""On a GPU: several long prompts in one step of layers with states, in the CUDA graphs of such steps."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.e2e.fidelity import make_exact
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.batch import Spans
from server.engine.runtime.graphs.graph_set import Form, GraphSet
from server.engine.runtime.preparation.assembly import build_runner
from tests.engine.factories import make_request, run_together
from tests.engine.greedy_answers import small
from tests.engine.hybrids import without_other_kernels
from tests.engine.models import tiny_model
from tests.engine.test_hybrids_cuda import WIDE
from tests.engine.test_kinds_cuda import GPU

pytestmark = pytest.mark.gpu

TOKENS = 12
# Prompts that are computed together, but for their last tokens: in steps of up to 384, 512, 640, 768, 1024, 1536, 2048, 3072
# and 4096 tokens, with more than 8 sequences in up to 512, 1024 and 2048, and of short chunks only.
GROUPS = [
    [300, 60],
    [290, 130, 40],
    [330, 280],
    [200, 260, 280],
    [500, 480],
    [900, 400],
    [1000, 700, 60],
    [700, 1500, 310, 90, 400, 20],
    [1000, 1000, 1000, 600],
    [280, *[20] * 9],
    [700, *[30] * 9],
    [1000, 310, *[20] * 9],
    [120, 130, 140],
]
CONFIG = EngineConfig(
    device="cuda", max_num_seqs=12, max_num_batched_tokens=4096, max_model_len=1600, kv_cache_bytes=2**27,
    expanded_weights="off",
)  # fmt: skip
NF4 = {"qwen3_5_text": "qwen3.5-9b", "qwen3_5_moe_text": "qwen3.6-35b-a3b"}
"""Of the families that are tested in NF4, the configurations."""
Answer = tuple[list[int], list[int], list[float]]
"""A prompt, its answer, and the log-probabilities of the answer's tokens."""


def models_of(family: str, folder: Path, device: torch.device = GPU) -> tuple[Any, Any, Any]:
    """A random model in bfloat16 for the engine, the same for transformers, and the same in float32."""
    if family in NF4:
        ours, rounded, exact = (small(NF4[family], folder, device, num_hidden_layers=8) for _ in range(3))
        make_exact(exact)
        return ours, rounded, exact
    rounded = tiny_model(family, **WIDE[family]).to(device, torch.bfloat16)
    return copy.deepcopy(rounded), rounded, copy.deepcopy(rounded).float()


def answers_of(engine: Engine, groups: list[list[int]], vocabulary: int, seed: int = 1) -> list[Answer]:
    """Answers to random prompts of these numbers of tokens, group by group."""
    rng, found = random.Random(seed), []
    for group in groups:
        prompts = [[rng.randrange(3, vocabulary) for _ in range(length)] for length in group]
        requests = [make_request(prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=0) for prompt in prompts]
        for request, outputs in zip(requests, run_together(engine, *requests).values(), strict=True):
            assert outputs[-1].error is None
            answer = [token for output in outputs for token in output.new_token_ids]
            logprobs = [entry.logprob for output in outputs for entry in output.logprobs or ()]
            found.append((request.prompt_token_ids, answer, logprobs))
    return found


@torch.inference_mode()
def scores_of(model: Any, prompt: list[int], answer: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [tokens] each: how far an answer's tokens are behind a model's best ones, and their log-probabilities."""
    ids = torch.tensor([prompt + answer], device=model.device)
    logprobs = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    own = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return logprobs.amax(-1) - own, own


def compare(answers: list[Answer], rounded: Any, exact: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 [answers, TOKENS] each: what tokens are behind the best (ADR 39); errors of log-probabilities; theirs."""
    found = []
    for prompt, answer, logprobs in answers:
        (behind, own), (behind_exact, expected) = (scores_of(model, prompt, answer) for model in (rounded, exact))
        ours = torch.tensor(logprobs, device=expected.device)
        found.append((torch.minimum(behind, behind_exact), ours - expected, own - expected))
    behind, errors, their_errors = (torch.stack(each) for each in zip(*found, strict=True))
    return behind, errors, their_errors


def size_of(errors: torch.Tensor) -> float:
    """The root of their mean square."""
    return float(errors.square().mean().sqrt())


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "lfm2"])
def test_several_long_prompts_in_one_graph(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_other_kernels(family, monkeypatch)
    ours, rounded, exact = models_of(family, tmp_path)
    runner, replayed = build_runner(ours, CONFIG), set()
    plan = GraphSet._plan

    def noted(graphs: GraphSet, spans: Spans, form: Form) -> Any:
        if len(spans) > 1:
            replayed.add(form)
        return plan(graphs, spans, form)

    monkeypatch.setattr(GraphSet, "_plan", noted)
    answers = answers_of(Engine(runner, CONFIG), GROUPS, runner.limits.vocab_size)
    assert runner._graphs.mixed is not None
    assert {form for form in runner._graphs.mixed._graphs if form.is_long} <= replayed
    behind, errors, their_errors = compare(answers, rounded, exact)
    assert size_of(errors) <= 1.25 * size_of(their_errors)
    # What is left are near ties.
    assert float((behind == 0).double().mean()) > 0.9
