"""Async scheduling: steps launched before the last one's tokens are read give the same answers, whatever happens between."""

from __future__ import annotations

import copy
import itertools
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.grammar import Grammars
from server.engine.runtime.batch import batch_of
from server.engine.runtime.graphs.launched_step import LaunchedStep
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling.sampler import ModelOutput
from server.engine.runtime.step_input import step_input
from server.engine.scheduling.sequence import PLACEHOLDER
from server.engine.scheduling.step import Step
from server.types import RequestOutput
from tests.engine.factories import make_request, tokens
from tests.engine.models import VOCABULARY, tiny_model
from tests.marks import with_rest

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=32, max_num_seqs=6, enforce_eager=True)
MODEL = tiny_model("llama")


class AsyncRunner(ModelRunner):
    """Launches every decode step, as a GPU's runner does; launched counts them."""

    launched = 0

    @torch.inference_mode()
    def execute_async(self, step: Step, previous: LaunchedStep | None) -> LaunchedStep | None:
        if not all(c.samples and c.length == 1 for c in step.chunks):
            return None
        batch = batch_of(step_input(step), self._paged.block_size)
        if previous is not None:
            tokens = {id(c.sequence): int(t) for c, t in zip(previous.step.sampled, previous.tokens, strict=True)}
            ids = [
                tokens[id(c.sequence)] if i == PLACEHOLDER else i
                for c, i in zip(step.chunks, batch.ids.tolist(), strict=True)
            ]
            batch = replace(batch, ids=torch.tensor(ids))
        assert PLACEHOLDER not in batch.ids.tolist()
        self.launched += 1
        logits = self._paged.run(batch)
        best, greedy = logits.max(-1)
        return LaunchedStep(step, ModelOutput(logits, (best, greedy), batch.ids), self._sampler)


def make_engine(kind: type[ModelRunner], **changes: Any) -> tuple[Engine, Any]:
    config = CONFIG.model_copy(update=changes)
    plain = build_runner(copy.deepcopy(MODEL), config)
    runner = kind(plain._paged, plain.limits)
    return Engine(runner, config), runner


REQUESTS: list[dict[str, Any]] = [
    {"prompt": 9, "max_tokens": 20},
    {"prompt": 30, "max_tokens": 1},
    {"prompt": 3, "max_tokens": 30},
    {"prompt": 17, "max_tokens": 25},
    {"prompt": 40, "max_tokens": 2},
    {"prompt": 12, "max_tokens": 6, "temperature": 1.0, "seed": 4},
    {"prompt": 5, "max_tokens": 33, "temperature": 0.9, "top_p": 0.8, "seed": 5},
    {"prompt": 21, "max_tokens": 28},
]
OPTIONS: list[dict[str, Any]] = [
    {"prompt": 9, "max_tokens": 20, "repetition_penalty": 1.3, "logprobs": 3},
    {"prompt": 30, "max_tokens": 12, "presence_penalty": 0.9, "frequency_penalty": 0.3, "temperature": 1.0, "seed": 1},
    {"prompt": 3, "max_tokens": 30, "logprobs": 0},
    {"prompt": 17, "max_tokens": 25},
    {"prompt": 12, "max_tokens": 30, "logit_bias": {5: 3.0, 9: -100.0, 77: 2.5}, "temperature": 1.1, "seed": 2},
    {"prompt": 5, "max_tokens": 33, "min_tokens": 21, "stop_token_ids": tuple(range(0, VOCABULARY, 3)), "logprobs": 5},
    {"prompt": 21, "max_tokens": 28, "temperature": 0.9, "top_p": 0.8, "top_k": 20, "seed": 5, "logprobs": 20},
    {"prompt": 8, "max_tokens": 18, "repetition_penalty": 0.8, "logit_bias": {3: 4.0}, "min_tokens": 9, "logprobs": 1},
    {
        "prompt": 33,
        "max_tokens": 22,
        "frequency_penalty": 1.5,
        "temperature": 0.7,
        "top_p": 0.9,
        "min_p": 0.05,
        "seed": 3,
    },
]


def run(engine: Engine, requests: list[Any], aborts: dict[int, str] | None = None) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
        steps += 1
        if aborts and steps in aborts:
            engine.abort([aborts[steps]])
        assert steps < 1000
    return outputs


# 30 blocks hold three or so of the requests, so sequences are preempted while their tokens are unread.
@pytest.mark.parametrize("blocks", [None, 30])
@pytest.mark.parametrize("stop", [False, True])
def test_async_scheduling_changes_no_answer(blocks: int | None, stop: bool) -> None:
    plain, _ = make_engine(ModelRunner)
    requests = [make_request(**o) for o in REQUESTS]
    expected = run(plain, requests)
    if stop:
        # Stop each request at a token that it is known to generate, so that a step more is under way when it ends.
        for options, request in zip(REQUESTS, requests, strict=True):
            generated = tokens(expected[request.request_id])
            options_stop = (generated[len(generated) // 2],)
            requests[requests.index(request)] = make_request(**{**options, "stop_token_ids": options_stop})
        expected = run(make_engine(ModelRunner)[0], requests)
    changes = {} if blocks is None else {"kv_cache_bytes": blocks * 768 * 4, "max_model_len": 100}
    engine, runner = make_engine(AsyncRunner, **changes)
    got = run(engine, requests)
    for request in requests:
        assert tokens(got[request.request_id]) == tokens(expected[request.request_id])
        assert [o.finish_reason for o in got[request.request_id]][-1] is not None
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().preemptions > 0 or blocks is None or stop
    assert runner.launched > 5


# With "seen" the prompt is in the prefix cache, so that its last token alone is computed, in a step like those of decode.
@pytest.mark.parametrize(
    ("blocks", "seen"), with_rest(itertools.product((None, 34), (False, True)), [(None, True), (34, False)])
)
def test_options_stay_within_async_scheduling(blocks: int | None, seen: bool, caplog: pytest.LogCaptureFixture) -> None:
    requests = [make_request(**options) for options in OPTIONS for _ in range(2)]
    expected = run(make_engine(ModelRunner)[0], requests)
    changes = {} if blocks is None else {"kv_cache_bytes": blocks * 768 * 4, "max_model_len": 100}
    engine, runner = make_engine(AsyncRunner, **changes)
    if seen:
        run(engine, [make_request(9, max_tokens=1), make_request(17, max_tokens=1), make_request(33, max_tokens=1)])
    got = run(engine, requests)
    for request in requests:
        mine, theirs = got[request.request_id], expected[request.request_id]
        assert tokens(mine) == tokens(theirs)
        assert [o.finish_reason for o in mine] == [o.finish_reason for o in theirs]
        # Other batches sum in another order, so that log-probabilities differ by rounding.
        for a, b in zip(mine, theirs, strict=True):
            assert (a.logprobs is None) == (b.logprobs is None) == (request.sampling.logprobs is None)
            for one, other in zip(a.logprobs or [], b.logprobs or [], strict=True):
                assert one.token_id == other.token_id
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [t for t, _ in one.top] == [t for t, _ in other.top]
                assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], abs=1e-4)
    assert engine.stats().preemptions > 0 or blocks is None
    assert engine.stats().kv_blocks_used == 0
    assert runner.launched > 50
    assert not caplog.records


def test_the_time_of_a_step_is_that_until_its_tokens_are_read() -> None:
    """Also where the next step has been launched meanwhile."""
    engine, runner = make_engine(AsyncRunner)
    engine.add(make_request(9, max_tokens=20))
    begun, seconds, computed, steps = time.perf_counter(), list[float](), 0, 0
    while engine.has_work:
        outputs, steps = engine.step(), steps + 1
        if steps == 5:
            # Its prompt is computed behind a step that has been launched.
            engine.add(make_request(17, max_tokens=4))
        for stats in (outputs.before, outputs.stats):
            if stats is not None and stats.step_tokens:
                seconds.append(stats.step_seconds)
                computed += stats.step_tokens
    assert runner.launched > 10
    # Two KV blocks of the second prompt are the first one's.
    assert computed == 9 + 19 + (17 - 8) + 3
    assert min(seconds) > 0
    assert 0.2 * (time.perf_counter() - begun) < sum(seconds) < time.perf_counter() - begun


@pytest.mark.parametrize("aborted", [None, "old", "new", "both"])
def test_tokens_are_told_before_a_prompts_step(aborted: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is aborted between their telling and that step has no part in it."""
    old, new = make_request(9, "old", max_tokens=20), make_request(17, "new", max_tokens=4)
    expected = {name: tokens(own) for name, own in run(make_engine(ModelRunner)[0], [old, new]).items()}
    engine, runner = make_engine(AsyncRunner)
    computed: list[list[str]] = []
    execute = runner.execute

    def noted(step: Step) -> list[Any]:
        computed.append([chunk.sequence.request_id for chunk in step.chunks])
        results: list[Any] = execute(step)
        return results

    monkeypatch.setattr(runner, "execute", noted)
    engine.add(old)
    found: dict[str, list[int]] = {"old": [], "new": []}

    def step() -> list[str]:
        outputs = engine.step().outputs
        for output in outputs:
            found[output.request_id] += output.new_token_ids
        return [output.request_id for output in outputs]

    for _ in range(5):
        step()
    assert computed == [["old"]]
    engine.add(new)
    assert step() == ["old"]
    assert computed == [["old"]]
    names = {"both": ["old", "new"]}.get(aborted or "", [aborted] if aborted else [])
    engine.abort(names)
    running = [name for name in ("old", "new") if name not in names]
    if "new" in running:
        assert step() == running
        assert computed[1:] == [running]
    while engine.has_work:
        step()
    for name, own in found.items():
        assert own == expected[name][: len(own)]
        assert (len(own) == len(expected[name])) == (name in running)
    assert engine.stats().kv_blocks_used == 0


GRAMMARS = [
    LLMatcher.grammar_from_regex("([a-z]{1,9} ){1,30}"),
    LLMatcher.grammar_from_json_schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
    LLMatcher.grammar_from_regex("[ab]{4,9}"),
]


def test_grammars_stay_within_async_scheduling(embedded_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    vocabulary, end = 49152, 2
    model = tiny_model("llama", vocab_size=vocabulary)
    requests = [
        make_request(5 + i, max_tokens=24, grammar=GRAMMARS[i % 3] if i != 4 else None, **options)
        for i, options in enumerate(
            [
                {},
                {"temperature": 1.0, "seed": 1, "logprobs": 2},
                {"repetition_penalty": 1.2, "logprobs": 1},
                {"temperature": 0.8, "top_p": 0.9, "seed": 2},
                {"temperature": 1.0, "seed": 3},
                {"temperature": 1.0, "seed": 4, "presence_penalty": 0.5, "min_tokens": 6},
            ]
        )
    ]
    found = []
    for kind in (ModelRunner, AsyncRunner):
        plain = build_runner(copy.deepcopy(model), CONFIG)
        runner = kind(plain._paged, plain.limits)
        engine = Engine(runner, CONFIG, Grammars(embedded_folder, vocabulary, end))
        found.append(run(engine, requests))
    assert isinstance(runner, AsyncRunner)
    assert runner.launched > 15
    assert not caplog.records
    for request in requests:
        assert tokens(found[0][request.request_id]) == tokens(found[1][request.request_id])
        assert [o.error for o in found[1][request.request_id]] == [None] * len(found[1][request.request_id])
    assert any(found[1][r.request_id][-1].finish_reason == "stop" for r in requests)


def test_what_fails_to_launch_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [make_request(**options) for options in OPTIONS]
    expected = run(make_engine(ModelRunner)[0], requests)
    engine, runner = make_engine(AsyncRunner)
    launch, steps = runner.execute_async, itertools.count()

    def faulty(step: Step, previous: LaunchedStep | None) -> LaunchedStep | None:
        launched: LaunchedStep | None = launch(step, previous)
        number = next(steps)
        if number % 7 == 3:
            return None
        if launched is not None and number % 7 == 5:
            monkeypatch.setattr(launched, "_launched", None)
            monkeypatch.setattr(launched, "_sampler", None)
        return launched

    monkeypatch.setattr(runner, "execute_async", faulty)
    got = run(engine, requests)
    assert all(tokens(got[r.request_id]) == tokens(expected[r.request_id]) for r in requests)
    assert next(steps) > 20


@pytest.mark.parametrize("options", [REQUESTS, OPTIONS], ids=["plain", "options"])
def test_aborted_requests_get_nothing_more_and_the_others_everything(options: list[dict[str, Any]]) -> None:
    rng = random.Random(0)
    requests = [make_request(**own) for own in options]
    expected = run(make_engine(ModelRunner)[0], requests)
    for _ in range(5):
        engine, _runner = make_engine(AsyncRunner)
        aborted = {rng.randrange(1, 30): rng.choice(requests).request_id for _ in range(3)}
        got = run(engine, requests, aborted)
        for request in requests:
            mine, theirs = tokens(got[request.request_id]), tokens(expected[request.request_id])
            assert mine == (theirs[: len(mine)] if request.request_id in aborted.values() else theirs)
        assert engine.stats().kv_blocks_used == 0
        assert not engine.has_work


def test_the_placeholder_is_no_token() -> None:
    assert PLACEHOLDER not in range(VOCABULARY)
