"""Prefix caching: the same tokens with and without, hits counted, eviction, and no writes to shared blocks."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.core import Engine
from server.engine.runtime.batch import Batch
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.prefix import extend_keys
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.sequence import Phase, Sequence
from server.engine.scheduling.step import Step
from server.types import GenerateRequest, RequestOutput
from tests.engine.factories import SchedulerDriver, make_request, make_sequence, run_together, tokens
from tests.engine.models import FAMILIES, VOCABULARY, tiny_model
from tests.engine.test_core import CONFIG, make_engine
from tests.marks import with_rest

BLOCK_BYTES = 768 * 4


def run(engine: Engine, *requests: GenerateRequest) -> list[list[RequestOutput]]:
    return list(run_together(engine, *requests).values())


def prompts_with_shared_starts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    starts = [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in (9, 16, 33)]
    return [
        rng.choice(starts) + [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(0, 12))] for _ in range(count)
    ]


def test_a_prompt_seen_before_is_taken_from_the_cache_but_for_its_last_tokens() -> None:
    engine, _ = make_engine()
    prompt = list(range(3, 3 + 24))
    first, second = (run(engine, make_request(prompt, ignore_eos=True))[0] for _ in range(2))
    assert tokens(first) == tokens(second)
    assert {output.num_cached_tokens for output in first} == {0}
    # Five of the six blocks: the last token has to be computed.
    assert {output.num_cached_tokens for output in second} == {20}
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (48, 20)
    assert 0 < stats.device_memory_used < stats.device_memory_total
    # A conversation goes on: its answer is in the cache, too.
    longer = prompt + tokens(first) + [5, 6, 7]
    assert run(engine, make_request(longer))[0][0].num_cached_tokens == 28
    # One token at the start changes all that follows.
    assert run(engine, make_request([90, *prompt[1:]]))[0][0].num_cached_tokens == 0
    assert engine.stats().kv_blocks_used == 0


def test_a_prompt_that_is_scored_is_computed_whole_also_behind_a_request_of_the_same_id() -> None:
    engine, _ = make_engine()
    request = make_request(24, "same", prompt_logprobs=1)
    first, second = (run(engine, request)[0][0] for _ in range(2))
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs == second.prompt_logprobs


def test_a_prefix_is_shared_while_its_first_owner_still_runs() -> None:
    engine, _ = make_engine()
    prompt = list(range(3, 3 + 24))
    engine.add(make_request([*prompt, 40], "long", max_tokens=30, ignore_eos=True))
    engine.step()
    engine.step()
    used = engine.stats().kv_blocks_used
    engine.add(make_request([*prompt, 41], "late", max_tokens=2, ignore_eos=True))
    assert {output.request_id: output.num_cached_tokens for output in engine.step().outputs} == {"long": 0, "late": 24}
    assert engine.stats().kv_blocks_used == used + 1


@pytest.mark.parametrize(
    ("blocks", "temperature"), with_rest([(None, 0.0), (None, 1.0), (26, 0.0), (26, 1.0)], [(None, 0.0), (26, 1.0)])
)
def test_answers_are_the_same_without_it(blocks: int | None, temperature: float) -> None:
    changes = {} if blocks is None else {"kv_cache_bytes": blocks * BLOCK_BYTES, "max_model_len": 80}
    prompts = prompts_with_shared_starts(24, seed=blocks or 0)
    requests = [
        make_request(prompt, max_tokens=4 + i % 20, temperature=temperature, seed=i) for i, prompt in enumerate(prompts)
    ]
    plain, _ = make_engine(enable_prefix_caching=False, **changes)
    without = run(plain, *requests)
    assert all(outputs[0].num_cached_tokens == 0 for outputs in without)
    expected = [tokens(outputs) for outputs in without]
    engine, _ = make_engine(**changes)
    # Twice: the second time much is in the cache from the start, or evicted where it is small.
    for _ in range(2):
        found = run(engine, *requests)
        assert [tokens(outputs) for outputs in found] == expected
        assert engine.stats().kv_blocks_used == 0
        assert sum(outputs[0].num_cached_tokens for outputs in found) > 0
    assert (engine.stats().preemptions > 0) == (blocks is not None)


@pytest.mark.parametrize("family", with_rest(sorted(FAMILIES), ["gemma3_text", "gpt2", "llama", "phi3", "qwen3"]))
def test_every_family_answers_the_same_from_the_cache(family: str) -> None:
    prompt = prompts_with_shared_starts(5, seed=9)[-1] * 2
    runner = build_runner(tiny_model(family), CONFIG)
    engine = Engine(runner, CONFIG)
    first, second = (run(engine, make_request(prompt, max_tokens=20, ignore_eos=True))[0] for _ in range(2))
    assert second[0].num_cached_tokens >= len(prompt) - CONFIG.block_size
    assert tokens(first) == tokens(second)


def test_shared_blocks_are_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_engine(kv_cache_bytes=40 * BLOCK_BYTES, max_model_len=80)
    run_batch = runner._paged.run
    steps = 0

    def checked(batch: Batch) -> torch.Tensor:
        nonlocal steps
        steps += 1
        holders = [set(span.blocks) for span in batch.spans]
        written = [
            set((batch.slots[span.row : span.row + span.length] // CONFIG.block_size).tolist()) for span in batch.spans
        ]
        for i, mine in enumerate(written):
            assert mine <= holders[i]
            assert not any(mine & theirs for j, theirs in enumerate(holders) if j != i)
            assert all(engine._blocks._keys[block] is None for block in mine)
        return run_batch(batch)

    monkeypatch.setattr(runner._paged, "run", checked)
    run(engine, *(make_request(prompt, max_tokens=15) for prompt in prompts_with_shared_starts(30, seed=3)))
    assert steps > 30


def test_what_a_failed_request_computed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make_engine()
    prompt = list(range(3, 3 + 24))
    run_batch = runner._paged.run
    monkeypatch.setattr(runner._paged, "run", lambda *given: run_batch(*given) * float("nan"))
    assert run(engine, make_request(prompt))[0][-1].finish_reason == "error"
    monkeypatch.undo()
    outputs = run(engine, make_request(prompt, ignore_eos=True))[0]
    assert outputs[0].num_cached_tokens == 0
    assert len(tokens(outputs)) == 8


def test_keys_depend_on_salt_and_on_all_tokens_before() -> None:
    def keys(prompt: list[int], salt: bytes = b"") -> list[bytes]:
        made: list[bytes] = []
        extend_keys(made, prompt, 2, len(prompt) // 2, salt)
        return made

    assert keys([1, 2, 3, 4, 5]) == keys([1, 2, 3, 4, 6])
    assert keys([1, 2, 3, 4])[1] != keys([2, 1, 3, 4])[1]
    assert not set(keys([1, 2, 3, 4], b"a")) & set(keys([1, 2, 3, 4]))
    assert len(set(keys([7] * 20))) == 10
    # Keys of long prompts are remembered in groups: those made piece by piece, and from a remembered group on, are the same.
    prompt, piecewise = list(range(3, 603)), list[bytes]()
    for count in (1, 70, 128, 201, 300):
        extend_keys(piecewise, prompt, 2, count)
    assert piecewise == keys(prompt) == keys(prompt)
    other = keys([*prompt[:300], 0, *prompt[301:]])
    assert [own == before for own, before in zip(other, piecewise, strict=True)] == [True] * 150 + [False] * 150


events = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 30), st.integers(1, 9)), max_size=50)


@settings(max_examples=200, deadline=None)
@given(events, st.integers(10, 20), st.integers(1, 5), st.integers(1, 30), st.booleans())
def test_invariants_under_any_history(
    history: list[tuple[int, int, int, int]], num_blocks: int, block_size: int, budget: int, async_scheduling: bool
) -> None:
    blocks = BlockManager(num_blocks, block_size)
    length = min(40, num_blocks * block_size)
    scheduler = Scheduler(blocks, 4, budget, length, prefix_caching=True)
    driver = SchedulerDriver(scheduler, async_scheduling=async_scheduling)
    sequences: list[Sequence] = []

    def check_step(step: Step) -> None:
        assert step.chunks or async_scheduling
        for chunk in step.chunks:
            assert chunk.start == chunk.sequence.num_computed
            for place in range(chunk.start, chunk.start + chunk.length):
                block = chunk.sequence.blocks[place // block_size]
                assert sum(block in s.blocks for s in sequences) == 1
                assert blocks._keys[block] is None

    def step_once() -> None:
        driver.step(check_step)
        held = {block for s in sequences for block in s.blocks}
        assert blocks.num_used == len(held)
        assert set(blocks._by_key.values()) == {b for b, key in enumerate(blocks._keys) if key is not None}
        assert not set(blocks._free) & set(blocks._by_key.values())

    for kind, who, prompt, answer in history:
        if kind == 0 and prompt < length:
            # Prompts of one kind begin alike.
            sequences.append(
                make_sequence([who + 3] * (prompt // 2) + list(range(prompt - prompt // 2)), max_tokens=answer)
            )
            scheduler.add(sequences[-1])
        elif kind == 1 and sequences:
            scheduler.finish(sequences[prompt % len(sequences)].request_id, "abort" if who else "error")
        elif kind == 2 and driver.has_work:
            step_once()
    while driver.has_work:
        step_once()
    assert blocks.num_used == 0
    assert all(s.phase is Phase.FINISHED for s in sequences)
