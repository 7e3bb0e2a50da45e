"""Chunks of prompts beside decoding sequences are as long as the time for them allows."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.graphs.graph_set import decode_sizes
from server.engine.runtime.limits import auto_sequences
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.pace import FIRST_TOKENS, PrefillPace
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.step import Step
from tests.engine.factories import SchedulerDriver, make_request, make_sequence, run_together, tokens
from tests.engine.models import tiny_model

LIMIT_S = 0.09
DECODE_S, TOKEN_S = 0.006, 1 / 37_000  # of an 8B model on an H200


def seconds(step: Step) -> float:
    """A device's time: prompts' tokens cost more the longer their context is."""
    prefill = sum(c.length * (1 + c.start / 40_000) for c in step.chunks if not c.is_decode)
    return DECODE_S + TOKEN_S * prefill


@pytest.mark.parametrize("limit", [None, LIMIT_S])
def test_streams_have_no_longer_gaps_while_long_prompts_come(limit: float | None) -> None:
    pace = None if limit is None else PrefillPace(limit)
    scheduler = Scheduler(BlockManager(60_000, 16), 64, 8192, 40_000, pace=pace)
    driver = SchedulerDriver(scheduler)
    for _ in range(16):
        scheduler.add(make_sequence(20, max_tokens=10_000))
    gaps: list[float] = []
    prefilled = 0

    def run(step: Step) -> None:
        nonlocal prefilled
        own = sum(c.length for c in step.chunks if not c.is_decode)
        if any(c.is_decode for c in step.chunks):
            gaps.append(seconds(step))
            prefilled += own
        if pace is not None:
            pace.note(own, seconds(step))

    for number in range(300):
        if number % 15 == 5:
            scheduler.add(make_sequence(list(range(number, number + 8000)), max_tokens=1))
        driver.step(run)
    gaps.sort()
    p99 = gaps[int(0.99 * len(gaps))]
    if limit is None:
        assert p99 > 2 * LIMIT_S
    else:
        assert p99 <= LIMIT_S
        assert gaps[-1] < 1.15 * LIMIT_S
        # Prompts are not starved: while there are any, steps use most of their time.
        busy = [gap for gap in gaps if gap > 2 * DECODE_S]
        assert sum(busy) / len(busy) > 0.6 * LIMIT_S
    assert prefilled >= 19 * 8000


def test_the_pace_follows_the_device() -> None:
    pace = PrefillPace(0.1)
    assert pace.tokens == FIRST_TOKENS
    for _ in range(30):
        pace.note(0, 0.01)
        pace.note(pace.tokens, 0.01 + pace.tokens * 5e-5)
    assert 1600 < pace.tokens <= 1800
    pace.note(pace.tokens, 0.01 + pace.tokens * 2e-4)  # slower at once
    assert 400 < pace.tokens <= 450
    for _ in range(30):
        pace.note(pace.tokens, 0.01 + pace.tokens * 1e-5)
    assert 8000 < pace.tokens <= 9000
    pace.note(1000, 100.0)
    assert pace.tokens == 16  # however slow


def test_without_others_that_decode_a_prompt_has_the_whole_budget() -> None:
    scheduler = Scheduler(BlockManager(1000, 16), 8, 4096, 8000, pace=PrefillPace(0.001))
    driver = SchedulerDriver(scheduler)
    scheduler.add(make_sequence(list(range(6000)), max_tokens=9))
    assert [driver.step().num_tokens for _ in range(3)] == [4096, 1904, 1]
    scheduler.add(make_sequence(list(range(1, 2001)), max_tokens=1))
    assert driver.step().num_tokens == 1 + FIRST_TOKENS


def test_a_bounded_engine_gives_the_same_answers() -> None:
    config = EngineConfig(block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=128, enforce_eager=True)
    model = tiny_model("llama")
    options: list[dict[str, Any]] = [{"prompt": p, "max_tokens": n} for p, n in ((5, 40), (90, 9), (100, 5), (80, 7))]
    found = []
    for bound in (None, 0.01):
        runner = build_runner(copy.deepcopy(model), config)
        engine = Engine(runner, config.model_copy(update={"max_prefill_ms": bound}))
        requests = [make_request(**o) for o in options]
        outputs = run_together(engine, *requests)
        found.append([tokens(outputs[r.request_id]) for r in requests])
    assert found[0] == found[1]


def test_sequences_by_memory() -> None:
    gib = 2**30
    assert [auto_sequences(m * gib, None) for m in (16, 24, 40, 79, 141, 192)] == [128, 128, 256, 512, 1024, 1024]
    assert auto_sequences(141 * gib, 640_000) == 1024
    assert auto_sequences(141 * gib, 200_000) == 768
    assert auto_sequences(141 * gib, 10_000) == 128


def test_graphs_of_decode_steps_have_few_sizes_and_little_padding() -> None:
    for most in (1, 3, 8, 33, 100, 128, 130, 256, 300, 512, 700, 1024):
        sizes = decode_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
    assert decode_sizes(128) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    assert len(decode_sizes(1024)) == 32
    assert 448 not in decode_sizes(512)  # slow in cuBLAS on Hopper
    pairs = list(itertools.pairwise(decode_sizes(1024)))
    assert all(b <= 1.25 * a for a, b in pairs if a >= 48)
    assert all(b <= 1.125 * a for a, b in pairs if 128 <= a < 256)
