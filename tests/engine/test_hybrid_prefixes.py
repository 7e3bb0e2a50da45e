"""Prefix cache of models with states: what is computed again, and snapshots on the device and in host memory."""

from __future__ import annotations

import copy
import random

import pytest

from server.engine.core import Engine
from server.engine.runtime.limits import EngineConfigError
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.states.pool import StatePool
from server.types import GenerateRequest
from tests.engine.factories import make_request
from tests.engine.hybrids import CONFIG, answers, engine_of, model_of, prompt_of, state_bytes
from tests.engine.models import HYBRIDS
from tests.marks import with_rest


# Of the three with layers of Mamba2 the one whose layers also attend.
@pytest.fixture(params=with_rest(HYBRIDS, ["falcon_h1", "lfm2", "qwen3_5_text"]))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def computed_by(engine: Engine, request: GenerateRequest) -> tuple[list[int], int]:
    """The answer to a request that is alone, and how many tokens of its prompt were computed."""
    before = engine.stats().prefix_cache_hits
    answer = answers(engine, request)[0]
    return answer, len(request.prompt_token_ids) - (engine.stats().prefix_cache_hits - before)


def test_the_same_prompt_is_computed_once_but_for_its_end(family: str) -> None:
    engine = engine_of(family, CONFIG)
    for length in (8, 9, 10, 37, 64, 75):
        first, computed = computed_by(engine, make_request(prompt_of(length), ignore_eos=True))
        assert computed == length
        again, computed = computed_by(engine, make_request(prompt_of(length), ignore_eos=True))
        assert again == first
        assert computed <= 2 * CONFIG.block_size


def test_prefixes_of_any_length_give_the_answers_that_prompts_get_alone(family: str) -> None:
    # One prompt takes a quarter of them at most.
    budget = {"state_snapshot_tokens": 16, "state_snapshot_bytes": 32 * state_bytes(family)}
    engine = engine_of(family, CONFIG.model_copy(update=budget))
    plain = engine_of(family, CONFIG.model_copy(update={"enable_prefix_caching": False}))
    whole = prompt_of(90)
    answers(engine, make_request(whole, ignore_eos=True))
    for length in (3, 15, 17, 33, 50, 64, 81, 90):
        request = make_request(whole[:length] + prompt_of(7, length), ignore_eos=True)
        found, computed = computed_by(engine, request)
        assert found == answers(plain, make_request(request.prompt_token_ids, ignore_eos=True))[0]
        # At distances of 16 tokens, or at the end.
        assert computed <= 7 + 16
    assert engine.stats().state_snapshot_hits > 0
    assert plain.stats().state_snapshots == 0


def test_a_conversation_computes_little_more_than_what_is_new(family: str) -> None:
    """Of ten turns, each with a prompt and an answer of 50 to 700 tokens together."""
    config = CONFIG.model_copy(update={"block_size": 16, "max_num_batched_tokens": 256, "kv_cache_bytes": 2**23})
    engine = engine_of(family, config)
    plain = engine_of(family, config.model_copy(update={"enable_prefix_caching": False}))
    rng = random.Random(0)
    history: list[int] = []
    computed = new = 0
    for turn in range(10):
        added = prompt_of(rng.randint(40, 690), turn)
        request = make_request([*history, *added], max_tokens=10, ignore_eos=True)
        answer, own = computed_by(engine, request)
        if turn in (3, 9):
            assert answer == answers(plain, make_request(request.prompt_token_ids, max_tokens=10, ignore_eos=True))[0]
        computed, new = computed + own, new + len(request.prompt_token_ids) - len(history)
        # The template leaves the last tokens of a prompt out of earlier turns.
        history = [*request.prompt_token_ids[:-4], *answer]
    assert computed <= 1.1 * new


def test_snapshots_that_the_device_has_no_room_for_are_found_in_host_memory(family: str) -> None:
    state = state_bytes(family)
    budget = {"state_snapshot_bytes": state, "state_snapshot_host_bytes": 9 * state, "state_snapshot_tokens": 64}
    engine = engine_of(family, CONFIG.model_copy(update=budget))
    plain = engine_of(family, CONFIG.model_copy(update={"enable_prefix_caching": False}))
    conversations = [prompt_of(40, seed) for seed in range(3)]
    for prompt in conversations:
        answers(engine, make_request(prompt, ignore_eos=True))
    for seed, prompt in enumerate(conversations):
        turn = make_request([*prompt, *prompt_of(9, seed)], ignore_eos=True)
        answer, computed = computed_by(engine, turn)
        assert computed <= 9 + 2 * CONFIG.block_size
        assert answer == answers(plain, make_request(turn.prompt_token_ids, ignore_eos=True))[0]
    stats = engine.stats()
    assert stats.state_snapshots == 1
    assert stats.state_snapshots_on_host > 3
    assert stats.state_snapshot_hits == stats.state_snapshot_host_hits == 3


def test_host_memory_that_does_not_keep_a_state_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatePool, "copy", lambda *_: None)
    config = CONFIG.model_copy(update={"state_snapshot_host_bytes": 2**20})
    with pytest.raises(EngineConfigError, match=r"state_snapshot_host_bytes is 1048576: .* comes back changed"):
        build_runner(copy.deepcopy(model_of("qwen3_5_text")), config)


def test_snapshots_have_a_budget_of_their_own(family: str) -> None:
    state = state_bytes(family)
    for budget, slots in ((0, 0), (state, 1), (4 * state + 1, 4)):
        config = CONFIG.model_copy(update={"state_snapshot_bytes": budget})
        engine = engine_of(family, config)
        assert engine.stats().state_snapshot_slots == slots
        request = make_request(prompt_of(40), ignore_eos=True)
        first, _ = computed_by(engine, request)
        again, computed = computed_by(engine, make_request(request.prompt_token_ids, ignore_eos=True))
        assert again == first
        assert (computed < 40) == (slots > 0)
