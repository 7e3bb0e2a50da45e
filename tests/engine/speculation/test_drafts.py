"""A draft model: what it proposes, what it has computed, how many there are, and what happens when it fails.

That it changes no answer is in test_speculation.py.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from server.checkpoint.base import CheckpointError
from server.checkpoint.tokenizer_files import check_same_vocabulary
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.sequence import PLACEHOLDER, Sequence
from server.engine.speculation.costs import StepCosts
from server.engine.speculation.drafts import MAX_DRAFTED, SHORT_LAG, DraftSpeculator
from tests.engine.factories import make_request, run_together, tokens
from tests.engine.models import VOCABULARY, tiny_model
from tests.engine.speculation.test_speculator import started

pytestmark = pytest.mark.usefixtures("unmeasured")
CHEAP = StepCosts({size: 1 + size / 1000 for size in range(1, 33)})


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def make_engine(model: Any, draft: Any, costs: StepCosts = CHEAP, **changes: Any) -> tuple[Engine, DraftSpeculator]:
    config = EngineConfig(
        device="cpu", block_size=4, max_num_batched_tokens=32, max_num_seqs=6, max_model_len=200, kv_cache_bytes=2**21,
        enforce_eager=True, speculation="draft", draft_model="-",
    ).model_copy(update=changes)  # fmt: skip
    engine = Engine(build_runner(copy.deepcopy(model), config, draft=copy.deepcopy(draft)), config)
    speculator = engine._speculator
    assert isinstance(speculator, DraftSpeculator)
    speculator.costs = costs
    return engine, speculator


def plain_engine(model: Any) -> Engine:
    """An engine without speculation."""
    config = EngineConfig(kv_cache_bytes=2**21, enforce_eager=True)
    return Engine(build_runner(copy.deepcopy(model), config), config)


def followed(speculator: DraftSpeculator, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Places at which the draft model begins, and numbers of tokens that it computes, for each time that it catches up."""
    found: list[list[tuple[int, int]]] = []
    follow = speculator._model.follow

    def recorded(parts: list[tuple[Sequence, int, int]]) -> bool:
        found.append([(start, end - start) for _, start, end in parts])
        return follow(parts)

    monkeypatch.setattr(speculator._model, "follow", recorded)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_model_that_drafts_for_itself_is_always_right(family: str) -> None:
    model = tiny_model(family)
    plain = plain_engine(model)
    engine, _ = make_engine(model, model)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_p": 0.7, "top_k": 30, "seed": 6},
        {"max_tokens": 3},
    ]
    asked = [make_request(9 + 7 * i, **{"max_tokens": 40, "ignore_eos": True, **o}) for i, o in enumerate(options)]
    expected, got = run_together(plain, *asked), run_together(engine, *asked)
    for request in asked:
        assert tokens(got[request.request_id]) == tokens(expected[request.request_id])
    stats = engine.stats()
    # Rounding differs with a step's size, and so may a token at a near tie.
    assert 60 < sum(stats.accepted_by_place) >= 0.97 * stats.draft_tokens
    assert stats.accepted_by_place[MAX_DRAFTED - 1] > 0


def test_a_draft_model_of_another_shape_and_vocabulary(model: Any) -> None:
    small = tiny_model("qwen3", seed=3, num_hidden_layers=1, hidden_size=32, vocab_size=VOCABULARY - 20)
    large = tiny_model("llama", seed=4, num_hidden_layers=1, vocab_size=VOCABULARY + 64)
    asked = [
        make_request(list(range(VOCABULARY - 30, VOCABULARY)), max_tokens=30, temperature=t, seed=1) for t in (0, 1.5)
    ]
    plain = plain_engine(model)
    expected = run_together(plain, *asked)
    for draft in (small, large):
        engine, _ = make_engine(model, draft)
        got = run_together(engine, *asked)
        assert [tokens(got[r.request_id]) for r in asked] == [tokens(expected[r.request_id]) for r in asked]
        assert engine.stats().draft_tokens > 0


def test_a_prompt_is_caught_up_with_in_chunks_and_found_in_the_prefix_cache(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, speculator = make_engine(model, model)
    parts = followed(speculator, monkeypatch)
    prompt = [3 + i % 90 for i in range(101)]
    run_together(engine, make_request(prompt, max_tokens=20, ignore_eos=True))
    # 32 tokens a step, until what lacks can be computed with the first draft token.
    starts = [start for ((start, _),) in parts]
    assert starts == [0, 32, 64]
    assert [count for ((_, count),) in parts] == [32, 32, 32]
    del parts[:]
    run_together(engine, make_request([*prompt, 9, 8], max_tokens=20, ignore_eos=True))
    assert engine.stats().prefix_cache_hits == 100
    assert parts == []
    assert sum(engine.stats().accepted_by_place) > 20


def test_a_preempted_sequence_is_drafted_anew(model: Any) -> None:
    engine, _ = make_engine(model, model, kv_cache_bytes=2 * 768 * 4 * 25, max_model_len=90)
    asked = [make_request([5 + i, *range(3, 30)], max_tokens=40, ignore_eos=True) for i in range(4)]
    plain = plain_engine(model)
    expected, got = run_together(plain, *asked), run_together(engine, *asked)
    assert [tokens(got[r.request_id]) for r in asked] == [tokens(expected[r.request_id]) for r in asked]
    stats = engine.stats()
    assert stats.preemptions > 0
    assert sum(stats.accepted_by_place) >= 0.97 * stats.draft_tokens > 0


def test_draft_tokens_that_are_rejected_end_and_are_tried_again(model: Any) -> None:
    other = tiny_model("llama", seed=9)
    costs = StepCosts({size: 1 + size / 10 for size in range(1, 17)}, drafting=dict.fromkeys(range(1, 7), 0.1))
    engine, speculator = make_engine(model, other, costs)
    run_together(engine, make_request(9, max_tokens=150, ignore_eos=True))
    stats = engine.stats()
    assert sum(stats.accepted_by_place) < 0.2 * stats.draft_tokens
    assert 4 < stats.draft_tokens < 60
    _, step = started([[5, 6, 7]])
    (sequence,) = (chunk.sequence for chunk in step.chunks)
    state = speculator.state(sequence)
    state.computed, state.rate = 3, 0.1
    waited = next(count for count in range(5000) if speculator.plan(step))
    assert 20 < waited < 1000
    state.rate = 0.1
    speculator.count(sequence, 1, 0)
    assert not speculator.plan(step)


def test_a_draft_model_that_follows_at_once_leaves_the_newest_token(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Proposing begins behind a token that the draft model computes for it."""
    engine, speculator = make_engine(model, model, max_num_batched_tokens=64)
    parts = followed(speculator, monkeypatch)
    run_together(engine, make_request(40, max_tokens=12, ignore_eos=True))
    # Prompts are followed behind the first step that decodes, when two more tokens are known.
    assert parts == [[(0, 41)]]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_draft_model_that_is_wrong_does_not_follow_until_it_is_tried_again(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny_model("llama", seed=9)
    costs = StepCosts({size: 1 + size / 10 for size in range(1, 17)}, drafting=dict.fromkeys(range(1, 7), 0.45))
    engine, speculator = make_engine(model, other, costs)
    parts = followed(speculator, monkeypatch)
    run_together(engine, make_request(40, max_tokens=150, ignore_eos=True))
    # Its prompt, and then none of the three times that it lacked 33 tokens.
    assert parts == [[(0, 32)]]
    _, step = started([list(range(5, 50))])
    (sequence,) = (chunk.sequence for chunk in step.chunks)
    state = speculator.state(sequence)
    state.computed, state.rate = 3, 0.1
    followed_after = next(count for count in range(5000) if speculator.catch_up(step) or len(parts) > 1)
    assert 500 < followed_after < 2500
    assert parts[1][0][0] == 3


def test_more_draft_tokens_where_more_are_right_and_fewer_sequences_run(model: Any) -> None:
    costs = StepCosts({1: 1.0, 2: 1.02, 4: 1.03, 8: 1.05, 16: 1.2, 32: 1.6}, drafting={8: 0.05, 32: 0.1})
    _, speculator = make_engine(model, model, costs)

    def count(rate: float, sequences: int) -> float:
        chosen = speculator._chosen(sequences, [(rate, MAX_DRAFTED, make_sequence()) for _ in range(sequences)])
        return len(chosen) / sequences

    def make_sequence() -> Sequence:
        return Sequence(make_request(5), 0)

    by_rate = [count(rate, 1) for rate in (0.02, 0.3, 0.6, 0.8, 0.95)]
    assert by_rate == sorted(by_rate)
    assert (by_rate[0], by_rate[-1]) == (0, 7)
    by_load = [count(0.8, sequences) for sequences in (1, 4, 8, 16, 31)]
    assert by_load == sorted(by_load, reverse=True)
    assert by_load[0] >= 3
    assert by_load[-1] < 1


def test_a_draft_model_that_fails_costs_no_answer(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = make_engine(model, model)
    expected = run_together(engine, request := make_request(60, max_tokens=20, ignore_eos=True))

    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("no memory\nfor this")

    paged: Any = engine._runner.draft_model
    for name in ("run", "hidden_states"):
        monkeypatch.setattr(paged._paged, name, fails)
    before = engine.stats().draft_tokens
    for prompt in (60, 70):
        request = make_request(prompt, request.request_id, max_tokens=20, ignore_eos=True)
        got = run_together(engine, request)
        if prompt == 60:
            assert tokens(got[request.request_id]) == tokens(expected[request.request_id])
    assert engine.stats().draft_tokens == before
    warned = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert warned == ["the draft model fails, and proposes nothing: RuntimeError: no memory"]


def test_beyond_its_own_context_a_draft_model_proposes_nothing(model: Any) -> None:
    short = tiny_model("llama", max_position_embeddings=48)
    engine, speculator = make_engine(model, short)
    assert speculator._max_model_len == 48
    outputs = run_together(engine, request := make_request(30, max_tokens=60, ignore_eos=True))[request.request_id]
    assert len(tokens(outputs)) == 60
    longest = [len(output.new_token_ids) for output in outputs]
    assert max(longest[:18]) > 1
    assert set(longest[-40:]) == {1}


def test_what_it_has_computed_counts_until_blocks_are_handed_out_anew() -> None:
    blocks, model = BlockManager(4, 4), Mock(longest=100)
    speculator = DraftSpeculator(CHEAP, 100, model, blocks, lambda: 32)
    one, other, third = (Sequence(make_request(11), 0) for _ in range(3))
    blocks.grow(one.blocks, 12)
    speculator._note_computed(one, 9)
    other.blocks = [*one.blocks]
    assert [speculator.state(own).computed for own in (one, other)] == [9, 8]
    other.blocks = one.blocks[1:]
    assert speculator.state(other).computed == 4
    blocks.release(one.blocks)
    blocks.grow(third.blocks, 16)
    assert speculator.state(third).computed == 0
    assert SHORT_LAG < 64  # what graphs of drafted tokens compute of one sequence


def test_the_tokenizers_must_be_the_same(embedded_folder: Path, tmp_path: Path) -> None:
    for file in embedded_folder.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "config.json").write_text((embedded_folder / "config.json").read_text())
    check_same_vocabulary(embedded_folder, tmp_path)
    found = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = found["model"]["vocab"]
    one, other = list(vocabulary)[1000:1002]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match=r"its tokenizer is not that of .* 2 tokens differ") as caught:
        check_same_vocabulary(embedded_folder, tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_first_draft_tokens_move_a_sequences_rate_further_than_later_ones(model: Any) -> None:
    _, speculator = make_engine(model, model)
    sequence = Sequence(make_request(5), 0)
    state = speculator.state(sequence)
    state.rate = 0.7
    moved = []
    for _ in range(40):
        before = state.rate
        speculator.count(sequence, 1, 0)
        moved.append(1 - state.rate / before)
    assert state.num_verified == 40
    assert moved == pytest.approx(sorted(moved, reverse=True))
    assert moved[0] == pytest.approx(1 / 8)
    assert moved[-1] == pytest.approx(1 / 24)


def test_draft_tokens_that_a_grammar_cuts_have_taken_their_time(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = StepCosts({size: 1 + size / 1000 for size in range(1, 33)}, drafting={1: 0.25})
    _, speculator = make_engine(model, model, costs)
    _, step = started([[5, 6, 7]])
    (sequence,) = (chunk.sequence for chunk in step.chunks)
    sequence.bind(Mock(permitted=lambda tokens: 0))
    step.schedule_drafts({sequence.request_id: [PLACEHOLDER] * 3})
    unread = Mock(read=lambda: {sequence.request_id: [5, 5, 5]})
    monkeypatch.setattr(speculator._model, "propose", lambda *_: unread)
    speculator.propose(step)
    assert step.drafts == {sequence.request_id: [5]}
    noted: list[tuple[int, float, bool]] = []
    monkeypatch.setattr(costs, "note", lambda *given: noted.append(given))
    speculator.note_time(step, 3.0)
    assert noted == [(2, 3.0 - 3 * 0.25, True)]
