"""Many greedy requests of mixed lengths, some cancelled, many preempted, against each of them alone."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.types import GenerateRequest
from tests.engine.factories import make_request
from tests.engine.greedy_answers import VOCABULARY, small
from tests.engine.models import tiny_model

COUNT = 200
STARTS = 6


def make_requests(vocabulary: int, longest: int, most_answers: int, count: int = COUNT) -> list[GenerateRequest]:
    """Prompts of 1 to longest tokens, some of which begin alike."""
    rng = random.Random(5)
    starts = [[rng.randrange(3, vocabulary) for _ in range(longest // 2)] for _ in range(STARTS)]
    requests = []
    for _ in range(count):
        own = [rng.randrange(3, vocabulary) for _ in range(rng.randint(1, longest // 2))]
        prompt = rng.choice(starts) + own if rng.random() < 0.3 else own
        requests.append(make_request(prompt, max_tokens=rng.randint(1, most_answers), ignore_eos=True))
    return requests


def run(engine: Engine, requests: list[GenerateRequest], cancel: bool) -> tuple[dict[str, list[int]], set[str]]:
    """Answers by request id, and the ids that were cancelled; requests arrive a few at a time."""
    rng = random.Random(6)
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    coming, cancelled = list(reversed(requests)), set()
    while coming or engine.has_work:
        for _ in range(min(len(coming), rng.randint(0, 8))):
            engine.add(coming.pop())
        for output in engine.step().outputs:
            assert output.error is None
            answers[output.request_id] += output.new_token_ids
        if cancel and rng.random() < 0.1:
            request_id = rng.choice(requests).request_id
            cancelled.add(request_id)
            engine.abort([request_id])
    return answers, cancelled


def check(
    requests: list[GenerateRequest],
    found: dict[str, list[int]],
    cancelled: set[str],
    alone: dict[str, list[int]],
    reference: PreTrainedModel,
    near_tie: float,
) -> int:
    """Number of requests that parted from what they get alone, each where the model could hardly choose."""
    parted = []
    for request in requests:
        mine, expected = found[request.request_id], alone[request.request_id]
        assert len(expected) == request.sampling.max_tokens
        assert len(mine) == len(expected) or request.request_id in cancelled
        if mine == expected[: len(mine)]:
            continue
        place = next(i for i, (a, b) in enumerate(zip(mine, expected, strict=False)) if a != b)
        ids = torch.tensor([request.prompt_token_ids + expected[:place]], device=reference.device)
        with torch.inference_mode():
            logits = reference(ids).logits[0, -1].float()
        behind = [float(logits.max() - logits[answer[place]]) for answer in (mine, expected)]
        parted.append(
            (max(behind), request.request_id, f"token {place}, behind {ids.shape[1]}, {behind} below the best")
        )
    wrong = [own for own in parted if own[0] > near_tie]
    assert not wrong, f"{len(wrong)} of {len(parted)} that parted, of {len(requests)}: {wrong}"
    return len(parted)


@pytest.mark.parametrize("count", [40, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_many_requests_get_what_each_gets_alone(count: int) -> None:
    model = tiny_model("qwen3")
    # Keys and values of one token: 3 layers, 2 heads of 32, float32.
    block_bytes = 4 * 3 * 2 * 2 * 32 * 4
    config = EngineConfig(
        device="cpu", block_size=4, max_num_batched_tokens=48, max_num_seqs=12, max_model_len=128,
        enforce_eager=True,
    )  # fmt: skip
    # Less than the configuration lets a person ask for.
    config = config.model_copy(update={"kv_cache_bytes": 70 * block_bytes})
    requests = make_requests(model.config.vocab_size, longest=60, most_answers=40, count=count)
    engine = Engine(build_runner(copy.deepcopy(model), config), config)
    found, cancelled = run(engine, requests, cancel=True)
    assert engine.stats().preemptions > count // 20
    assert engine.stats().kv_blocks_used == 0
    assert len(cancelled) > count // 20
    single = config.model_copy(update={"enable_prefix_caching": False})
    one = Engine(build_runner(copy.deepcopy(model), single), single)
    alone = {id_: answer for request in requests for id_, answer in run(one, [request], cancel=False)[0].items()}
    assert check(requests, found, cancelled, alone, model, near_tie=1e-3) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
def test_many_requests_get_what_each_gets_alone_on_a_gpu(invariant: bool, tmp_path: Path) -> None:
    reference, model, other = (small("qwen3-8b", tmp_path, torch.device("cuda", 0)) for _ in range(3))
    block_bytes = 16 * 7 * 2 * 2 * 128 * 2
    config = EngineConfig(
        device="cuda", max_num_seqs=16, max_num_batched_tokens=128, max_model_len=256, kv_cache_bytes=24 * block_bytes,
        batch_invariant=invariant,
    )  # fmt: skip
    requests = make_requests(VOCABULARY, longest=150, most_answers=60)
    engines = []
    for weights, changes in ((model, {}), (other, {"enable_prefix_caching": False})):
        own = config.model_copy(update=changes)
        engines.append(Engine(build_runner(weights, own), own))
    found, cancelled = run(engines[0], requests, cancel=True)
    assert engines[0].stats().preemptions >= 5
    alone = {id_: answer for request in requests for id_, answer in run(engines[1], [request], cancel=False)[0].items()}
    # bfloat16: two sums of the same numbers in another order are up to two steps of 0.008 apart, both logits each.
    parted = check(requests, found, cancelled, alone, reference, near_tie=0.05)
    # Of all tokens 1 to 2 % are such near ties, and an answer has up to 60: 39 and 48 of 200 by two generations of GEMMs.
    assert parted == 0 if invariant else parted <= COUNT // 3
