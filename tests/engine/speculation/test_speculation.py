"""Speculation changes no answer: random requests with all options mixed, cancels and preemptions, on and off.

The slow tests have 500 requests for each method, or SPECULATION_REQUESTS (`make test-speculation`).
"""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from server.config import LoraModule
from server.engine.core import Engine
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.scheduling.step import Step
from tests.adapters import ALL_PROJECTIONS, save_adapter
from tests.engine.factories import make_request, run_together, tokens
from tests.engine.speculation.engines import (
    GRAMMAR,
    WAVE,
    LaunchingRunner,
    close,
    is_at_a_boundary,
    joined,
    make_engine,
    repeating_model,
    run_wave,
    sampled_on_a_gpu,
    some_requests,
)
from tests.marks import with_rest

pytestmark = pytest.mark.usefixtures("unmeasured")
# Requests of each of the three kinds of engines.
FEW, MANY = 20, int(os.environ.get("SPECULATION_REQUESTS", "500")) // 3
METHODS: dict[str, dict[str, Any]] = {
    "lookup": {"speculation": "lookup"},
    "draft": {"speculation": "draft"},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return repeating_model()


@pytest.fixture(scope="module")
def adapter(model: Any, tmp_path_factory: pytest.TempPathFactory) -> LoraModule:
    folder = tmp_path_factory.mktemp("adapters") / "a"
    save_adapter(model, folder, 0, 0.3, r=4, target_modules=ALL_PROJECTIONS)
    return LoraModule(name="a", path=folder)


@pytest.fixture(scope="module")
def plain(model: Any, adapter: LoraModule, embedded_folder: Path) -> Engine:
    """An engine without speculation."""
    return make_engine(model, adapter, embedded_folder)


# 41 blocks hold two or so of the sequences, so many are preempted.
KINDS: dict[str, tuple[type[ModelRunner], int]] = {
    "wide": (ModelRunner, 240), "tight": (ModelRunner, 41), "async": (LaunchingRunner, 41),
}  # fmt: skip
LONG = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(
    ("kind", "method", "count"),
    [
        *with_rest(itertools.product(KINDS, METHODS, [FEW]), [("wide", "lookup", FEW)]),
        *(pytest.param(kind, method, MANY, marks=LONG) for kind in KINDS for method in METHODS),
    ],
)
def test_answers_are_the_same_with_and_without(
    kind: str,
    method: str,
    count: int,
    model: Any,
    adapter: LoraModule,
    embedded_folder: Path,
    plain: Engine,
) -> None:
    runner_type, blocks = KINDS[kind]
    chance = random.Random(f"{runner_type.__name__} {blocks}")
    drafting = make_engine(model, adapter, embedded_folder, runner_type, blocks, **METHODS[method])
    others: list[list[int]] = []
    checked = 0
    for wave in range(-(-count // WAVE)):
        requests = some_requests(chance, wave, others)
        expected, _ = run_wave(plain, requests, None)
        got, cancelled = run_wave(drafting, requests, chance)
        for request in requests:
            name = request.request_id
            wanted = joined(expected[name])
            assert wanted.finish_reason in ("stop", "length"), wanted.error
            others.append(request.prompt_token_ids + wanted.new_token_ids)
            if name in cancelled and not (got[name] and got[name][-1].finish_reason):
                begun = tokens(got[name])
                assert begun == wanted.new_token_ids[: len(begun)], request
                continue
            found = joined(got[name])
            if is_at_a_boundary(plain, model, adapter, request, found.new_token_ids, wanted.new_token_ids):
                print(f"{name}: another token at a boundary of the distribution: {request}")
                continue
            assert found.new_token_ids == wanted.new_token_ids, request
            assert (found.finish_reason, found.stop_token_id) == (wanted.finish_reason, wanted.stop_token_id), request
            assert close(found.logprobs, wanted.logprobs), request
            assert close(found.prompt_logprobs, wanted.prompt_logprobs), request
            checked += 1
        assert drafting.stats().kv_blocks_used == 0
    stats = drafting.stats()
    assert checked > 0.7 * count
    assert sum(stats.accepted_by_place) > (count // 4 if (kind, method) == ("async", "draft") else count)
    assert stats.draft_tokens > sum(stats.accepted_by_place)
    assert (stats.preemptions > 0) == (blocks < 240)
    runner = drafting._runner
    if isinstance(runner, LaunchingRunner):
        assert runner.launched + runner.launched_drafts > count // 2
        assert runner.launched_drafts > count // 10


@pytest.mark.parametrize("method", ["lookup", pytest.param("draft", marks=pytest.mark.rest)])
def test_steps_with_draft_tokens_that_are_read_after_the_next_message(
    method: str, model: Any, adapter: LoraModule, embedded_folder: Path, plain: Engine
) -> None:
    """As on a GPU a step with draft tokens is launched, and requests come and go before its tokens are read."""
    chance = random.Random(method)
    drafting = make_engine(model, adapter, embedded_folder, LaunchingRunner, 60, **METHODS[method])
    unfinished = 0
    for wave in range(2):
        requests = [sampled_on_a_gpu(request) for request in some_requests(chance, wave, [])]
        expected, _ = run_wave(plain, requests, None)
        got, cancelled = run_wave(drafting, requests, chance)
        for request in requests:
            wanted, found = joined(expected[request.request_id]), got[request.request_id]
            if not (found and found[-1].finish_reason):
                assert request.request_id in cancelled
                assert tokens(found) == wanted.new_token_ids[: len(tokens(found))]
                unfinished += 1
            elif not is_at_a_boundary(plain, model, adapter, request, tokens(found), wanted.new_token_ids):
                whole = joined(found)
                assert whole.new_token_ids == wanted.new_token_ids, request
                assert (whole.finish_reason, whole.stop_token_id) == (wanted.finish_reason, wanted.stop_token_id)
        assert drafting.stats().kv_blocks_used == 0
    stats, runner = drafting.stats(), drafting._runner
    assert isinstance(runner, LaunchingRunner)
    assert runner.launched_drafts > 8
    assert 0 < unfinished < 30
    assert stats.preemptions > 0
    assert stats.draft_tokens > sum(stats.accepted_by_place) > 20


def test_a_step_brings_several_tokens_and_says_how_many_were_accepted(
    model: Any, adapter: LoraModule, embedded_folder: Path, plain: Engine
) -> None:
    drafting = make_engine(model, adapter, embedded_folder, speculation="lookup")
    # With this bias nothing else comes.
    request = make_request([5, 6, 7] * 5, max_tokens=40, logit_bias={9: 100.0}, ignore_eos=True)
    (expected,) = run_together(plain, request).values()
    (outputs,) = run_together(drafting, request).values()
    assert tokens(outputs) == tokens(expected) == [9] * 40
    assert len(expected) == 40
    assert len(outputs) < 15
    assert [output.finish_reason for output in outputs] == [*[None] * (len(outputs) - 1), "length"]
    timings, stats = outputs[-1].timings, drafting.stats()
    assert timings is not None
    assert timings.draft_tokens == stats.draft_tokens > 0
    assert timings.accepted_tokens == sum(stats.accepted_by_place) == 40 - len(outputs)
    alone = make_request([5, 6, 7] * 5, max_tokens=40, logit_bias={9: 100.0}, ignore_eos=True, speculation=False)
    assert len(next(iter(run_together(drafting, alone).values()))) == 40
    assert drafting.stats().draft_tokens == stats.draft_tokens


@pytest.mark.parametrize(
    ("method", "temperature"),
    with_rest(itertools.product(METHODS, (0.0, 0.7)), [("lookup", 0.7), ("draft", 0.0)]),
)
def test_draft_tokens_under_a_grammar(
    method: str,
    temperature: float,
    model: Any,
    adapter: LoraModule,
    embedded_folder: Path,
    plain: Engine,
) -> None:
    """Draft tokens are cut where the grammar refuses them; the answer is the one without them."""
    drafting = make_engine(model, adapter, embedded_folder, speculation=method)
    checked: list[tuple[int, int]] = []
    execute = drafting._runner.execute

    def seen(step: Step) -> list[Sampled]:
        for chunk in step.chunks:
            constraint, drafts = chunk.sequence.constraint, [*chunk.draft_tokens]
            if constraint is not None and drafts:
                checked.append((len(drafts), constraint.permitted(drafts)))
        return execute(step)

    drafting._runner.execute = seen  # type: ignore[method-assign]
    # The letters a, b and c come again and again.
    bias = dict.fromkeys((81, 82, 83), 20.0)
    requests = [
        make_request([5, 6, 7] * 5, max_tokens=40, temperature=temperature, seed=seed, grammar=GRAMMAR, logit_bias=bias)
        for seed in range(3)
    ]
    expected, found = run_together(plain, *requests), run_together(drafting, *requests)
    for request in requests:
        wanted, got = joined(expected[request.request_id]), joined(found[request.request_id])
        assert got.new_token_ids == wanted.new_token_ids
        assert (got.finish_reason, got.stop_token_id) == (wanted.finish_reason, wanted.stop_token_id)
    stats = drafting.stats()
    # The draft model knows nothing of the bias and of the grammar. One of its tokens that is refused is verified, too.
    refused = 0 if method == "lookup" else 1
    assert sum(stats.accepted_by_place) > 30 or refused
    assert checked
    assert all(permitted <= count <= permitted + refused for count, permitted in checked)


def test_grammars_that_refuse_all_draft_tokens_of_some_sequences(
    model: Any, adapter: LoraModule, embedded_folder: Path, plain: Engine
) -> None:
    """A step in which only some of the sequences that were to have draft tokens keep any is computed as it is."""
    drafting = make_engine(model, adapter, embedded_folder, speculation="lookup")
    # What followed before is mostly refused.
    order = "".join("(abc){4}(acb){4}" for _ in range(3))
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: /{order}/"}]})
    requests = [
        make_request([5, 6, 7 + i] * 5, max_tokens=60, ignore_eos=True, **({"grammar": grammar} if i > 1 else {}))
        for i in range(6)
    ]
    lengths: set[tuple[bool, ...]] = set()
    execute = drafting._runner.execute

    def seen(step: Step) -> list[Sampled]:
        if step.drafts:
            lengths.add(tuple(bool(chunk.draft_tokens) for chunk in step.chunks))
        return execute(step)

    drafting._runner.execute = seen  # type: ignore[method-assign]
    expected, found = run_together(plain, *requests), run_together(drafting, *requests)
    for request in requests:
        name = request.request_id
        assert tokens(found[name]) == tokens(expected[name])
        assert joined(found[name]).finish_reason == joined(expected[name]).finish_reason
    assert any(len(set(some)) == 2 for some in lengths)


@pytest.mark.parametrize("penalty", [0.9, pytest.param(1.1, marks=pytest.mark.rest)])
def test_draft_tokens_under_penalties(
    penalty: float, model: Any, adapter: LoraModule, embedded_folder: Path, plain: Engine
) -> None:
    """Each place is sampled with the penalties of the draft tokens in front of it."""
    drafting = make_engine(model, adapter, embedded_folder, speculation="lookup")
    requests = [
        make_request([5, 6, 7 + seed] * 5, max_tokens=60, temperature=t, seed=seed, ignore_eos=True, **penalties)
        for seed, penalties in enumerate(
            [{"repetition_penalty": penalty}, {"presence_penalty": -2.0, "frequency_penalty": 0.02}] * 2
        )
        for t in (0.0, 0.5)
    ]
    expected, found = run_together(plain, *requests), run_together(drafting, *requests)
    for request in requests:
        wanted, got = joined(expected[request.request_id]), joined(found[request.request_id])
        if not is_at_a_boundary(plain, model, adapter, request, got.new_token_ids, wanted.new_token_ids):
            assert got.new_token_ids == wanted.new_token_ids
    stats = drafting.stats()
    assert sum(stats.accepted_by_place) > (100 if penalty < 1 else 10)
