"""Speculation by lookup for models with layers that keep states: rejected draft tokens leave nothing behind."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.graphs import graph_set
from server.engine.runtime.graphs.graph_set import DRAFT_SIZES, Tokens, chunk_sizes
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.preparation.states import state_slots
from server.engine.runtime.preparation.step_costs import measure_steps
from server.engine.runtime.runner import StepGraphs
from server.types import GenerateRequest, RequestOutput
from tests.engine.factories import fix_costs, make_request, run_together, tokens
from tests.engine.graphs.test_graph_set import captured
from tests.engine.hybrids import say_few_tokens
from tests.engine.models import HYBRIDS, VOCABULARY, tiny_model
from tests.engine.scored import check_outputs
from tests.engine.speculation.engines import CHEAP
from tests.marks import with_rest

# 40 blocks of 4 tokens.
CONFIG = EngineConfig(
    device="cpu", block_size=4, max_num_batched_tokens=32, max_num_seqs=5, speculation="lookup",
    state_snapshot_tokens=16, state_snapshot_bytes=2**20,
).model_copy(update={"kv_cache_bytes": 40 * 4 * 512, "max_model_len": 150})  # fmt: skip
TOLERANCE = 3e-4


@functools.cache
def model_of(family: str) -> PreTrainedModel:
    model = tiny_model(family)
    say_few_tokens(model)
    return model


def engine_of(family: str, **changes: Any) -> Engine:
    config = CONFIG.model_copy(update=changes)
    engine = Engine(build_runner(copy.deepcopy(model_of(family)), config), config)
    if engine._speculator is not None:
        fix_costs(engine, CHEAP)
    return engine


def some_requests(seed: int) -> list[GenerateRequest]:
    """Of prompts with beginnings in common and with repetitions, greedy ones and sampled ones."""
    rng = random.Random(seed)
    common = [rng.randrange(3, VOCABULARY) for _ in range(40)]
    found = []
    for index in range(14):
        own = [rng.randrange(3, 12) for _ in range(rng.choice((1, 4, 9)))]
        prompt = common[: rng.choice((0, 17, 40))] + own * rng.choice((1, 3))
        temperature = rng.choice((0.0, 0.0, 0.7))
        options = {"temperature": temperature, "seed": index, "ignore_eos": True, "logprobs": 0}
        found.append(make_request(prompt, max_tokens=rng.choice((2, 20, 50)), **options))
    return found


@pytest.mark.parametrize("family", with_rest(HYBRIDS, ["qwen3_5_text", "nemotron_h"]))
def test_answers_are_those_without_speculation(family: str) -> None:
    """With preemption, prefixes that are found, and requests that are cancelled."""
    requests = some_requests(1)
    expected = run_together(engine_of(family, speculation="off", enable_prefix_caching=False), *requests)
    engine = engine_of(family)
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    waiting, cancelled, rng = [*requests], set[str](), random.Random(2)
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.5:
            engine.add(waiting.pop(0))
        for output in engine.step().outputs:
            assert output.error is None
            outputs[output.request_id].append(output)
        if rng.random() < 0.02:
            running = [name for name, own in outputs.items() if own and own[-1].finish_reason is None]
            cancelled.update(running[:1])
            engine.abort(running[:1])
    stats = engine.stats()
    # Many draft tokens were accepted, also several of a step, and many were not.
    assert stats.draft_tokens > 20 + sum(stats.accepted_by_place)
    assert sum(stats.accepted_by_place) > 10
    assert stats.accepted_by_place[1] > 0
    assert stats.preemptions > 0
    assert stats.state_snapshot_hits > 0
    for request in requests:
        found, whole = tokens(outputs[request.request_id]), tokens(expected[request.request_id])
        assert found == (whole[: len(found)] if request.request_id in cancelled else whole), request
        if request.sampling.temperature == 0.0 and found:
            check_outputs(model_of(family), request.prompt_token_ids, outputs[request.request_id], TOLERANCE)


def test_without_prefix_caching() -> None:
    """In chunks of few tokens."""
    family = "qwen3_5_text"
    engine = engine_of(family, enable_prefix_caching=False, max_num_batched_tokens=5)
    requests = some_requests(3)
    for request, outputs in zip(requests, run_together(engine, *requests).values(), strict=True):
        if request.sampling.temperature == 0.0:
            check_outputs(model_of(family), request.prompt_token_ids, outputs, TOLERANCE)
    stats = engine.stats()
    assert stats.draft_tokens > sum(stats.accepted_by_place) > 0


def test_memory_for_states_has_room_for_a_second_one() -> None:
    plain = CONFIG.model_copy(update={"speculation": "off", "enable_prefix_caching": False})
    speculating = CONFIG.model_copy(update={"enable_prefix_caching": False})
    assert [state_slots(100, 1.0, 1000, 0, config, 50).sequences for config in (plain, speculating)] == [10, 5]


def test_a_step_with_draft_tokens_may_begin_with_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sequence that was preempted, all of whose tokens but the newest another one had in its prompt."""
    engine = engine_of("qwen3_5_text")
    first = make_request([5, 9, 3, 7, 4, 8, 6], max_tokens=30, ignore_eos=True)
    expected = tokens(run_together(engine, first)[first.request_id])
    # Its prompt's last snapshot is at 24 tokens.
    run_together(engine, make_request([*first.prompt_token_ids, *expected[:17], 1, 2, 1, 2, 1], max_tokens=1))
    speculator = engine._speculator
    assert speculator is not None
    monkeypatch.setattr(speculator, "plan", lambda _: {})
    again = make_request(first.prompt_token_ids, max_tokens=30, ignore_eos=True)
    other = make_request([3, 8, 3], max_tokens=100, ignore_eos=True)
    engine.add(again)
    engine.add(other)
    found: list[int] = []
    while len(found) < 18:
        found += [
            token
            for output in engine.step().outputs
            for token in output.new_token_ids
            if output.request_id == again.request_id
        ]
    engine._scheduler._preempt(engine._scheduler._running[0])
    # The sequence gets the other one's row, whose state is the other one's.
    engine.abort([other.request_id])
    monkeypatch.setattr(speculator, "plan", lambda _: {again.request_id: expected[18:21]})
    for output in engine.step().outputs:
        assert output.error is None
        found += output.new_token_ids
    assert found == expected[:22]


@pytest.mark.parametrize("family", with_rest(HYBRIDS, ["qwen3_5_text"]))
def test_steps_in_graphs_as_a_gpu_has_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens are chunks of small graphs, with what is computed again after a rejection."""
    monkeypatch.setattr(graph_set, "unowned", lambda tensor: tensor)
    config = CONFIG.model_copy(update={"enforce_eager": True})
    runner = build_runner(copy.deepcopy(model_of(family)), config)
    paged, states, scratch = runner._paged, runner.states, runner.limits.num_blocks - 1
    runner.limits = replace(runner.limits, num_blocks=scratch)
    sizes = [*DRAFT_SIZES, *chunk_sizes(config.max_num_batched_tokens or 0)]
    mixed = captured(paged, Tokens.CHUNKS, sizes, scratch, max_num_seqs=5, states=states)
    decode = captured(paged, Tokens.NEWEST, [1, 2, 4, 5], scratch, states=states)
    runner._graphs = StepGraphs(decode, mixed)
    with torch.inference_mode():
        costs = measure_steps(paged, runner.limits, runner._graphs)
    assert costs._verifying.sizes == list(DRAFT_SIZES)
    assert costs._plain.sizes == [1, 2, 4, 5]
    monkeypatch.setattr(paged, "run_class", lambda _: pytest.fail("a step ran without a graph"))
    engine = Engine(runner, config)
    fix_costs(engine, CHEAP)
    requests = some_requests(4)
    for request, outputs in zip(requests, run_together(engine, *requests).values(), strict=True):
        if request.sampling.temperature == 0.0:
            check_outputs(model_of(family), request.prompt_token_ids, outputs, TOLERANCE)
    stats = engine.stats()
    assert stats.draft_tokens > sum(stats.accepted_by_place) > 10
    assert stats.preemptions > 0
