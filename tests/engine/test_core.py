"""The engine in this process on a tiny model: whole requests, preemption, failures that stay with their request."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
import torch

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.execution import _restored_first
from server.engine.grammar import GrammarError
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.scheduling.prompt_images import ImageError
from server.engine.scheduling.step import Chunk, Step
from tests.engine.factories import make_request, make_sequence, run_together, tokens
from tests.engine.models import VOCABULARY, tiny_model

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=32, max_num_seqs=6, enforce_eager=True)
MODEL = tiny_model("llama")


def make_engine(**changes: Any) -> tuple[Engine, ModelRunner]:
    config = CONFIG.model_copy(update=changes)
    runner = build_runner(copy.deepcopy(MODEL), config)
    return Engine(runner, config), runner


REQUESTS: list[dict[str, Any]] = [
    {"prompt": 9, "max_tokens": 20},
    {"prompt": 30, "max_tokens": 20, "temperature": 1.0, "seed": 1},
    {"prompt": 3, "max_tokens": 30, "temperature": 0.8, "top_p": 0.9, "seed": 2, "frequency_penalty": 0.5},
    {"prompt": 17, "max_tokens": 25, "temperature": 1.2, "top_k": 20, "seed": 3, "presence_penalty": 1.0},
    {"prompt": 40, "max_tokens": 20, "repetition_penalty": 1.3},
    {"prompt": 12, "max_tokens": 30, "temperature": 1.0, "seed": -4, "logit_bias": {5: 3.0}, "min_tokens": 12},
]


def test_together_and_preempted_give_what_each_gives_alone() -> None:
    alone, _ = make_engine()
    expected = [tokens(run_together(alone, r)[r.request_id]) for r in (make_request(**o) for o in REQUESTS)]
    assert all(len(e) > 1 for e in expected)
    together, _ = make_engine()
    # 24 blocks hold two or three of them: 768 bytes a token, 4 tokens a block.
    small, _ = make_engine(kv_cache_bytes=768 * 4 * 24, max_model_len=80)
    for engine in (together, small):
        requests = [make_request(**o) for o in REQUESTS]
        outputs = run_together(engine, *requests)
        assert [tokens(outputs[r.request_id]) for r in requests] == expected
        assert engine.stats().kv_blocks_used == 0
    assert together.stats().preemptions == 0
    assert small.stats().preemptions > 0


def test_the_last_output_tells_why_and_how_long() -> None:
    engine, _ = make_engine()
    request = make_request(9, max_tokens=4, ignore_eos=True)
    outputs = run_together(engine, request)[request.request_id]
    assert [o.finish_reason for o in outputs] == [None, None, None, "length"]
    timings = outputs[-1].timings
    assert timings is not None
    assert timings.queue >= 0
    assert timings.prefill > 0
    assert timings.decode > 0
    stop = make_request(9, stop_token_ids=(tokens(outputs)[1],))
    last = run_together(engine, stop)[stop.request_id][-1]
    assert (last.finish_reason, last.stop_token_id) == ("stop", tokens(outputs)[1])
    assert last.new_token_ids == [last.stop_token_id]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [VOCABULARY]}, "outside the vocabulary"),
        ({"prompt": [-1]}, "outside the vocabulary"),
        ({"prompt": [5] * 300}, "does not fit"),
        ({"prompt": [5], "temperature": -1.0}, "temperature"),
        ({"prompt": [5], "temperature": float("nan")}, "finite"),
        ({"prompt": [5], "top_p": 0.0}, "top_p"),
        ({"prompt": [5], "logit_bias": {VOCABULARY: 1.0}}, "logit_bias"),
        ({"prompt": [5], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [5], "repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_a_bad_request_gets_an_error_and_leaves_the_others_alone(options: dict[str, Any], reason: str) -> None:
    engine, _ = make_engine()
    good, bad = make_request(5), make_request(**options)
    outputs = run_together(engine, good, bad)
    (output,) = outputs[bad.request_id]
    assert output.finish_reason == "error"
    assert reason in (output.error or "")
    assert outputs[good.request_id][-1].finish_reason in ("stop", "length")


def test_an_id_in_use_is_refused() -> None:
    engine, _ = make_engine()
    outputs = run_together(engine, make_request(5, "same", ignore_eos=True), make_request(5, "same"))["same"]
    assert [o.finish_reason for o in outputs].count("error") == 1
    assert len(tokens(outputs)) == 8


@pytest.mark.parametrize("kind", [ImageError, GrammarError])
def test_data_that_cannot_be_computed_fails_its_request_alone(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected_engine, _ = make_engine()
    good = make_request(5, ignore_eos=True)
    expected = tokens(run_together(expected_engine, good)[good.request_id])
    engine, runner = make_engine()
    execute = runner.execute

    def faulty(step: Step) -> list[Sampled]:
        if any(c.sequence.request_id == "bad" and c.start > 6 for c in step.chunks):
            raise kind("no such data\nsecond line")
        return execute(step)

    monkeypatch.setattr(runner, "execute", faulty)
    bad = msgspec.structs.replace(make_request(5, "bad", ignore_eos=True), http_request_id="the client's")
    outputs = run_together(engine, good, bad)
    assert tokens(outputs[good.request_id]) == expected
    assert outputs["bad"][-1].finish_reason == "error"
    assert outputs["bad"][-1].error == f"the model failed: {kind.__name__}: no such data"
    assert engine.stats().failed_steps == {"request": 1, "engine": 0}
    lines = [line for line in caplog.records if line.getMessage().startswith("bad failed")]
    assert [getattr(line, "http_request_id", None) for line in lines] == ["the client's"]
    assert engine.stats().kv_blocks_used == 0


def test_chunks_computed_alone_read_snapshots_before_others_replace_them() -> None:
    sequence = make_sequence(4)

    def chunk(restored: int, *saved: int) -> Chunk:
        return Chunk(sequence, 0, 1, False, restored=restored, saved=saved)

    # The second one begins with what the first one replaces, the third with what the second one replaces.
    assert list(_restored_first([chunk(3, 0), chunk(0, 1), chunk(1)])) == [2, 1, 0]
    assert list(_restored_first([chunk(-1, 4), chunk(2, 2), chunk(-1)])) == [0, 1, 2]


@pytest.mark.parametrize("error", [TypeError("'int' is not iterable"), ValueError("x must end in 64")])
def test_a_fault_of_the_engine_ends_its_step_once_and_the_engine_goes_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed again: a fault that comes back with every step must not make a slow server of it."""
    engine, runner = make_engine()
    execute, calls = runner.execute, 0

    def faulty(step: Step) -> list[Sampled]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error
        return execute(step)

    monkeypatch.setattr(runner, "execute", faulty)
    requests = [make_request(5, name, ignore_eos=True) for name in "abc"]
    outputs = run_together(engine, *requests)
    assert {found[-1].error for found in outputs.values()} == {f"the model failed: {type(error).__name__}: {error}"}
    assert calls == 3
    assert engine.stats().failed_steps == {"request": 0, "engine": 1}
    assert engine.stats().kv_blocks_used == 0
    assert len(tokens(run_together(engine, make_request(5, "next", ignore_eos=True))["next"])) == 8


def test_a_lack_of_memory_in_a_step_names_the_options(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, runner = make_engine()
    runner.advice = "options that free memory: engine.images false (0.86 GiB)"

    def full(step: Step) -> list[Sampled]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner, "execute", full)
    run_together(engine, make_request(5, "a"))
    assert runner.advice in caplog.text


def test_logits_that_are_not_numbers_fail_only_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_engine()
    forward = runner.forward

    def faulty(step: Step) -> torch.Tensor:
        logits = forward(step).clone()
        for row, chunk in enumerate(step.sampled):
            if chunk.sequence.request_id == "bad":
                logits[row] = float("nan")
        return logits

    monkeypatch.setattr(runner, "forward", faulty)
    good = make_request(5, ignore_eos=True)
    outputs = run_together(engine, good, make_request(5, "bad"))
    assert outputs["bad"][-1].error == "the model's logits are not numbers"
    assert len(tokens(outputs[good.request_id])) == 8


def test_abort_frees_blocks_before_the_next_step() -> None:
    engine, _ = make_engine()
    engine.add(make_request(40, "a", max_tokens=50))
    engine.step()
    assert engine.stats().kv_blocks_used > 0
    engine.abort(["a", "unknown"])
    assert engine.stats().kv_blocks_used == 0
    assert not engine.has_work


def test_stats_describe_the_step() -> None:
    engine, _ = make_engine()
    engine.add(make_request(5, "a"))
    first = engine.step().stats
    assert (first.running, first.step_tokens, first.step_prefill_tokens, first.step_batch) == (1, 5, 5, 1)
    engine.add(make_request(40, "b"))
    second = engine.step().stats
    assert (second.running, second.step_tokens, second.step_prefill_tokens, second.step_batch) == (2, 32, 31, 2)
    assert second.step_seconds > 0
