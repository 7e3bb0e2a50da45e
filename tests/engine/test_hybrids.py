"""Models with layers that keep a state of each sequence: answers equal to transformers' own, whatever a step is made of."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import random
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

from server.checkpoint.states import STATE_KINDS, attends
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.execution import Executor
from server.engine.grammar import GrammarError, GrammarState
from server.engine.runtime.layers.outer import write_rotary
from server.engine.runtime.limits import EngineConfigError
from server.engine.runtime.preparation import states
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.states.pool import StateError
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.scheduler import Scheduler
from server.types import GenerateRequest, RequestOutput
from tests.engine.factories import make_request, make_sequence, run_together, tokens
from tests.engine.hybrids import (
    CONFIG,
    TOLERANCE,
    answers,
    check_steps,
    engine_of,
    model_of,
    prompt_of,
    reference_logits,
    runner_of,
    state_bytes,
)
from tests.engine.models import HYBRIDS
from tests.engine.scored import check_outputs
from tests.engine.test_async_scheduling import AsyncRunner
from tests.marks import with_rest


# Of the three with layers of Mamba2 the one whose layers also attend.
@pytest.fixture(params=with_rest(HYBRIDS, ["falcon_h1", "lfm2", "qwen3_5_text"]))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class AnglesOfAxes(nn.Module):
    """The rotary embedding of Qwen3.5 in transformers 5.17: it takes positions with axes only, and joins these."""

    rope_type, attention_scaling = "default", 1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1, 0.01]))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (position_ids[:, :, None, :].float().transpose(2, 3) * self.inv_freq)[0].repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def test_rotary_angles_of_positions_with_axes() -> None:
    own, x, positions = AnglesOfAxes(), torch.zeros(1), torch.arange(7)[None]
    with pytest.raises(IndexError):
        own(x, positions)
    written = write_rotary(own, has_axes=False)
    assert written is not None
    axes = positions.expand(3, 1, 7)
    for found, expected in zip(written(x, axes), own(x, axes), strict=True):
        torch.testing.assert_close(found, expected)
    # With images positions of axes may differ. Those of a text are one row, expanded, and take no call of the module.
    written = write_rotary(own, has_axes=True)
    assert written is not None
    rows = torch.stack([positions, positions + 1, positions + 2])
    for given in (axes, rows):
        torch.testing.assert_close(written(x, given), own(x, given))
    own.inv_freq = torch.zeros(3)
    assert not torch.equal(written(x, axes)[1], own(x, axes)[1])
    assert torch.equal(written(x, rows)[1], own(x, rows)[1])
    apart = AnglesOfAxes()
    apart.forward = lambda x, position_ids: (x, x)  # type: ignore[method-assign]
    assert write_rotary(apart, has_axes=False) is None


def test_layers_are_written_ones(family: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build_runner(copy.deepcopy(model_of(family)), CONFIG)
    assert "layers run by the server's own code" in caplog.text
    kinds = model_of(family).config.layer_types
    states, attending = sum(kind in STATE_KINDS for kind in kinds), sum(map(attends, kinds))
    assert f"{states} " in caplog.text
    assert f"MB a sequence, {attending} of attention" in caplog.text


@pytest.mark.parametrize("eager", [True, False], ids=["transformers' layers", "written layers"])
@pytest.mark.parametrize("chunk", [1, 63, 64, 65, 300])
def test_prompts_in_chunks_give_transformers_logits(family: str, chunk: int, eager: bool) -> None:
    runner = runner_of(family, enforce_eager=eager)
    scheduler = Scheduler(BlockManager(120, CONFIG.block_size), 1, chunk, 400)
    lengths = (1, 2, chunk, 130) if chunk == 1 else (1, chunk - 1, chunk, chunk + 1, 2 * chunk + 1)
    check_steps(family, runner, scheduler, [make_sequence(prompt_of(n), max_tokens=3) for n in lengths if n < 390])


@pytest.mark.slow
def test_a_prompt_of_a_long_chunk_gives_transformers_logits(family: str) -> None:
    runner = runner_of(family, kv_cache_bytes=2**22)
    scheduler = Scheduler(BlockManager(1100, CONFIG.block_size), 1, 4095, 4200)
    check_steps(family, runner, scheduler, [make_sequence(prompt_of(4097), max_tokens=2)])


def test_mixed_steps_and_preempted_sequences_give_transformers_logits(family: str) -> None:
    # 32 blocks hold about half of it.
    scheduler = Scheduler(BlockManager(32, CONFIG.block_size), 5, 16, 128)
    sequences = [make_sequence(prompt_of(n), max_tokens=30) for n in (1, 5, 41, 17, 30, 2, 9)]
    check_steps(family, runner_of(family), scheduler, sequences)
    assert scheduler.num_preemptions > 0


def test_from_one_to_many_sequences_in_a_batch(family: str) -> None:
    runner = runner_of(family, max_num_seqs=64, max_num_batched_tokens=64)
    for count in (1, 2, 17, 64):
        scheduler = Scheduler(BlockManager(64 * 8, CONFIG.block_size), 64, 64, 128)
        check_steps(family, runner, scheduler, [make_sequence(prompt_of(3, i), max_tokens=4) for i in range(count)])


def test_two_sequences_swapped_in_a_batch_keep_their_states(family: str) -> None:
    runner = runner_of(family)
    scheduler = Scheduler(BlockManager(60, CONFIG.block_size), 2, 64, 128)
    pair = [make_sequence(prompt_of(n), max_tokens=9) for n in (7, 12)]
    for sequence in pair:
        scheduler.add(sequence)
    for turn in range(9):
        step = scheduler.schedule()
        if turn % 2:
            step.chunks = step.chunks[::-1]
        rows = runner.forward(step)
        scheduler.advance(step)
        for chunk, row in zip(step.sampled, rows, strict=True):
            expected = reference_logits(family, chunk.sequence.tokens[: chunk.start + chunk.length])[-1]
            assert (row.log_softmax(-1) - expected.log_softmax(-1)).abs().max() < TOLERANCE
        scheduler.resolve(step, [int(row.argmax()) for row in rows])


def launching_of(family: str, config: EngineConfig) -> Engine:
    """An engine that launches a step before the one in front of it has been read."""
    built = build_runner(copy.deepcopy(model_of(family)), config)
    return Engine(AsyncRunner(built._paged, built.limits), config)


# 60 blocks of 4 tokens.
MIXED = CONFIG.model_copy(
    update={"kv_cache_bytes": 60 * 4 * 512, "max_num_seqs": 5, "max_model_len": 200, "state_snapshot_tokens": 16}
)


@functools.cache
def mixed_requests(family: str) -> list[tuple[GenerateRequest, list[int]]]:
    """Requests of different lengths with prefixes in common, each with the answer that it gets alone."""
    alone = engine_of(family, MIXED.model_copy(update={"enable_prefix_caching": False}))
    rng = random.Random(family)
    common = prompt_of(50)
    requests = []
    for index in range(40):
        prompt = common[: rng.choice((0, 11, 32, 50))] + prompt_of(rng.choice((1, 2, 5, 16, 33, 64, 70)), index)
        sampling = {"temperature": rng.choice((0.0, 1.0)), "seed": index, "ignore_eos": True, "logprobs": 0}
        requests.append(make_request(prompt, max_tokens=rng.choice((1, 3, 12, 40)), **sampling))
    return [(request, answers(alone, request)[0]) for request in requests]


@pytest.mark.parametrize(
    ("family", "kind"),
    with_rest(itertools.product(HYBRIDS, ("plain", "async")), [("qwen3_5_text", "async"), ("lfm2", "plain")]),
    indirect=["family"],
)
def test_many_mixed_requests_get_the_answers_that_they_get_alone(family: str, kind: str) -> None:
    """With aborts, too few KV blocks for all, more requests than slots, and prefixes that are found at any length.

    Greedy answers have transformers' log-probabilities.
    """
    requests = [request for request, _ in mixed_requests(family)]
    expected = {request.request_id: answer for request, answer in mixed_requests(family)}
    engine = {"plain": engine_of, "async": launching_of}[kind](family, MIXED)
    rng = random.Random(kind)
    found: dict[str, list[RequestOutput]] = {}
    aborted, waiting = set(), [*requests]
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), rng.choice((0, 0, 1, 3)))):
            engine.add(waiting.pop(0))
        for output in engine.step().outputs:
            assert output.error is None
            found.setdefault(output.request_id, []).append(output)
        if found and rng.random() < 0.05:
            aborted.add(name := rng.choice([*found]))
            engine.abort([name])
    assert engine.stats().preemptions > 0
    assert engine.stats().state_snapshot_hits > 5
    for request in requests:
        outputs, whole = found.get(request.request_id, []), expected[request.request_id]
        answer = tokens(outputs)
        assert answer == (whole[: len(answer)] if request.request_id in aborted else whole), request
        if answer and request.sampling.temperature == 0.0:
            check_outputs(model_of(family), request.prompt_token_ids, outputs, TOLERANCE)


def test_a_step_is_not_computed_twice(family: str) -> None:
    runner = runner_of(family)
    scheduler = Scheduler(BlockManager(60, CONFIG.block_size), 2, 64, 128)
    scheduler.add(make_sequence(prompt_of(9)))
    first = scheduler.schedule()
    runner.forward(first)
    scheduler.advance(first)
    scheduler.resolve(first, [5])
    step = scheduler.schedule()
    runner.forward(step)
    with pytest.raises(StateError, match="begins at token 9 of a sequence whose state ends at 10"):
        runner.forward(step)
    results, failures = Executor(runner).execute(step)
    assert len(results) == len(failures) == 1


def test_a_grammar_that_fails_ends_its_own_request_only(family: str) -> None:
    engine = engine_of(family, CONFIG)
    requests = [make_request(prompt_of(n), max_tokens=6, ignore_eos=True) for n in (5, 9, 12)]
    expected = [answers(engine, request)[0] for request in requests]
    for request in requests:
        engine.add(request)
    broken: Future[Any] = Future()
    broken.set_exception(GrammarError("it is broken"))
    engine._scheduler._by_id[requests[1].request_id].bind(GrammarState(broken, broken))
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    errors = {}
    while engine.has_work:
        for output in engine.step().outputs:
            found[output.request_id] += output.new_token_ids
            errors[output.request_id] = output.error
    assert "it is broken" in str(errors[requests[1].request_id])
    for request, whole in zip(requests[::2], expected[::2], strict=True):
        assert found[request.request_id] == whole
        assert errors[request.request_id] is None


def test_embeddings_are_transformers_hidden_states(family: str) -> None:
    engine = engine_of(family, CONFIG)
    prompt = prompt_of(70)
    outputs = run_together(engine, request := make_request(prompt, max_tokens=1, embed=True), make_request(9))
    with torch.inference_mode():
        expected = model_of(family).base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0, -1]
    embedding = outputs[request.request_id][-1].embedding
    assert embedding is not None
    found = torch.frombuffer(bytearray(embedding), dtype=torch.float32)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_few_sequences_run_where_memory_is_short(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = state_bytes(family)
    cache = CONFIG.kv_cache_bytes
    assert cache is not None
    monkeypatch.setattr(states, "available_bytes", lambda _: 2 * (cache + 5 * state))
    runner = build_runner(copy.deepcopy(model_of(family)), CONFIG)
    assert runner.limits.max_num_seqs == 3  # and a snapshot for every second
    requests = [make_request(prompt_of(n), max_tokens=4, ignore_eos=True) for n in (5, 9, 12, 3, 8)]
    whole = engine_of(family, CONFIG)
    assert answers(Engine(runner, CONFIG), *requests) == [answers(whole, request)[0] for request in requests]
    monkeypatch.setattr(states, "available_bytes", lambda _: 2 * cache)
    with pytest.raises(EngineConfigError, match="no memory for them"):
        build_runner(copy.deepcopy(model_of(family)), CONFIG)
