"""Latent attention whose cache keeps latents, beside transformers' own in float32."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from transformers import PreTrainedModel

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.attention.latent import LatentHeads
from server.engine.runtime.preparation.assembly import build_runner
from server.types import RequestOutput
from tests.engine.factories import make_request, run_together, tokens
from tests.engine.models import VOCABULARY, tiny_model
from tests.marks import with_rest
from tests.moe_checkpoints import tiny_moe

CONFIG = EngineConfig(
    device="cpu", block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=80, max_num_seqs=64, enforce_eager=True
)
# Of each token and layer: a latent of 40 and 8 rotary columns, in float32.
TOKEN = 3 * (40 + 8) * 4


def _model(family: str) -> PreTrainedModel:
    return tiny_moe(family) if family.startswith("deepseek") else tiny_model(family)


def test_the_cache_keeps_latents() -> None:
    runner = build_runner(tiny_model("youtu"), CONFIG.model_copy(update={"kv_cache_bytes": 100 * TOKEN}))
    assert runner.limits.max_model_len == 100


@pytest.mark.parametrize(
    ("family", "expands"),  # None: as has fewer operations
    with_rest(
        itertools.product(["youtu", "minicpm3", "deepseek_v2", "deepseek_v3"], [False, True, None]),
        [("youtu", False), ("minicpm3", True), ("deepseek_v2", None), ("deepseek_v3", None)],
    ),
)
def test_many_sequences_give_transformers_tokens_and_logprobs(
    family: str, expands: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 sequences of which some begin alike, in a cache that holds few of them."""
    if expands is not None:
        monkeypatch.setattr(LatentHeads, "expands", lambda *_: expands)
    model = _model(family)
    reference = copy.deepcopy(model)
    bytes_per_token = TOKEN if family in ("youtu", "minicpm3") else 2 * (32 + 16) * 4
    # Written layers in one of the cases, transformers' own in the others.
    config = CONFIG.model_copy(update={"kv_cache_bytes": 300 * bytes_per_token, "enforce_eager": expands is not None})
    engine = Engine(build_runner(model, config), config)
    rng = random.Random(family)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(21)]
    prompts = [
        shared[: rng.randrange(0, 22)] + [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 30))]
        for _ in range(64)
    ]
    for count in (1, 3, 60):
        own = [make_request(prompts.pop(), max_tokens=9, ignore_eos=True, logprobs=1) for _ in range(count)]
        outputs = run_together(engine, *own)
        for request in own:
            _check(reference, request.prompt_token_ids, outputs[request.request_id])
    assert engine.stats().prefix_cache_hits > 0
    assert engine.stats().preemptions > 0


def _distances(
    reference: PreTrainedModel, prompt: list[int], outputs: list[RequestOutput]
) -> tuple[torch.Tensor, bool]:
    """(how far log-probabilities are from the reference's, whether all tokens are its likeliest)."""
    found = tokens(outputs)
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *found]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(found)[:, None])[:, 0]
    return (torch.tensor([entry.logprob for entry in entries]) - expected).abs(), found == logits.argmax(-1).tolist()


def _check(reference: PreTrainedModel, prompt: list[int], outputs: list[RequestOutput]) -> None:
    """Tokens are the reference's likeliest, with its log-probabilities."""
    distances, likeliest = _distances(reference, prompt, outputs)
    assert likeliest
    assert distances.max() < 5e-4


@pytest.mark.gpu
def test_latents_on_cuda_where_no_kernel_attends_over_heads() -> None:
    model = tiny_model("youtu").cuda()
    reference = copy.deepcopy(model).cpu()
    config = CONFIG.model_copy(update={"device": "cuda", "kv_cache_bytes": 300 * TOKEN, "enforce_eager": False})
    runner = build_runner(model, config)
    assert runner.limits.num_blocks * config.block_size == 300
    engine = Engine(runner, config)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 60))] for _ in range(24)]
    requests = [make_request(prompt, max_tokens=9, ignore_eos=True, logprobs=1) for prompt in prompts]
    outputs = run_together(engine, *requests)
    for request in requests:
        _check(reference, request.prompt_token_ids, outputs[request.request_id])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("family", ["youtu", "minicpm3"])
def test_latents_in_cuda_graphs(family: str) -> None:
    """Log-probabilities are those of the same weights in float32 but for rounding, and graphs compute the steps."""
    sizes = {"kv_lora_rank": 256, "qk_rope_head_dim": 16, "max_position_embeddings": 2048}
    model = tiny_model(family, **sizes).to(torch.bfloat16)
    reference = copy.deepcopy(model).float()
    config = CONFIG.model_copy(update={"device": "cuda", "block_size": 16, "enforce_eager": False})
    config = config.model_copy(update={"max_num_batched_tokens": 1024, "kv_cache_bytes": 2**24})
    runner = build_runner(model.cuda(), config)
    engine = Engine(runner, config)
    rng = random.Random(0)
    for count, longest in ((1, 40), (20, 60), (2, 600)):
        prompts = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, longest))] for _ in range(count)]
        requests = [make_request(prompt, max_tokens=9, ignore_eos=True, logprobs=1) for prompt in prompts]
        before = runner.graph_replays
        outputs = run_together(engine, *requests)
        assert runner.graph_replays > before
        for request in requests:
            distances, _ = _distances(reference, request.prompt_token_ids, outputs[request.request_id])
            assert distances.mean() < 0.1


def test_draft_tokens_are_verified_over_latents() -> None:
    model = tiny_model("youtu")
    config = CONFIG.model_copy(update={"speculation": "lookup"})
    prompt = [5, 9, 60, 7] * 8
    answers = []
    for own in (CONFIG, config):
        request = make_request(prompt, max_tokens=24, ignore_eos=True)
        outputs = run_together(Engine(build_runner(copy.deepcopy(model), own), own), request)
        answers.append(tokens(outputs[request.request_id]))
    assert answers[0] == answers[1]


def test_room_for_adapters_keeps_heads(caplog: pytest.LogCaptureFixture) -> None:
    """Their factors change what keys and values are made of latents."""
    config = CONFIG.model_copy(update={"allow_runtime_lora": True, "kv_cache_bytes": 100 * 3 * 4 * (16 + 8 + 20) * 4})
    assert build_runner(tiny_model("youtu"), config).limits.max_model_len == 100
    assert "176 numbers for a token and layer rather than 48: kv_b_proj is a AdaptedLinear" in caplog.text
