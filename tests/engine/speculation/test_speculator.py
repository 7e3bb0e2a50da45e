"""Number of draft tokens of steps: by what they cost, how likely they are right, and how many sequences there are."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from msgspec.structs import replace

from server.config import ConfigError, EngineConfig
from server.config.sources import load_config
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.step import Step
from server.engine.speculation.costs import StepCosts, gains_of
from server.engine.speculation.lookup import LookupProposer
from server.engine.speculation.speculator import MAX_DRAFT_TOKENS, Speculator
from tests.engine.factories import make_sequence

FLAT = {1: 1.0, 2: 1.01, 4: 1.02, 8: 1.05, 16: 1.1}
STEEP = {size: float(size) for size in (1, 2, 3, 4, 8)}


@pytest.mark.parametrize(
    ("costs", "sequences", "survivals", "best"),
    [
        (FLAT, 1, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], 7),
        (FLAT, 1, [0.005], 0),
        (FLAT, 1, [], 0),
        (FLAT, 3, [0.5], 1),  # a step of three takes as long as one of four
        (FLAT, 16, [0.99], 0),
        (FLAT, 17, [0.99], 0),
        (STEEP, 1, [0.99] * 7, 0),
        ({1: 1.0, 2: 1.2, 3: 2.4}, 1, [0.9, 0.9], 1),
    ],
)
def test_the_best_number_lets_sequences_go_on_fastest(
    costs: dict[int, float], sequences: int, survivals: list[float], best: int
) -> None:
    assert number(StepCosts(costs), sequences, survivals) == best


def number(costs: StepCosts, sequences: int, survivals: list[float]) -> int:
    """Number of draft tokens that pays best, of sequences that have them in turn; survivals: chances of a token."""
    own = (gains_of(survivals[first::sequences]) for first in range(sequences))
    return costs.fastest(sequences, sorted(itertools.chain(*own), reverse=True))[0]


def test_one_sequences_draft_tokens_do_not_slow_down_the_others() -> None:
    costs = StepCosts({1: 1.0, 8: 1.0, 16: 1.5, 24: 2.0})
    one = gains_of([1.0] * 8)
    assert sum(one) == pytest.approx(math.log(9))
    # 16 tokens instead of 8 in 1.5 times the time are more tokens per second, but seven of eight sequences get fewer.
    assert costs.fastest(8, one) == (0, 0.0)
    count, gain = costs.fastest(8, gains_of([1.0]) * 8)
    assert (count, round(gain, 3)) == (8, round(2 / 1.5, 3))
    # Where it costs next to nothing, one may have them: 9 ** (1 / 8) = 1.316.
    assert StepCosts({8: 1.0, 16: 1.05}).fastest(8, one)[0] == 8


def test_whether_draft_tokens_may_pay() -> None:
    assert [StepCosts(FLAT).may_pay(count) for count in (1, 8, 14, 15, 16, 17)] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    assert not StepCosts(STEEP).may_pay(1)
    drafting = {1: 0.2, 8: 0.2}
    assert StepCosts(FLAT, drafting=drafting).may_pay(1)
    assert not StepCosts(FLAT, drafting={1: 1.0, 8: 1.0}).may_pay(1)
    # Eight tokens of six sequences: two of them have a draft token.
    checking = {1: 1.0, 4: 1.06, 6: 1.12, 8: 1.15, 12: 2.1, 16: 2.2}
    assert StepCosts(checking, {1: 1.0, 8: 1.0}, {1: 0.1, 8: 0.1}).may_pay(6)


@pytest.mark.parametrize("unknown", [0, 1])
def test_what_draft_tokens_promise_is_the_sum_of_how_likely_they_are(unknown: int) -> None:
    proposer, tokens = LookupProposer(3), [1, 2, 3, 1, 2, 4, 1, 2, 3, 1]
    for known in range(1, len(tokens) + 1):
        proposer.follow(tokens, known, 100)
        for count in (0, 1, 4, MAX_DRAFT_TOKENS):
            likely = proposer.survival(count + unknown)[unknown:]
            assert sum(likely) - 0.01 * len(likely) <= proposer.promise(unknown, count) <= sum(likely) + 1e-9


def test_costs_follow_what_steps_take() -> None:
    costs = StepCosts(FLAT)
    assert number(costs, 1, [0.3]) == 1
    for _ in range(100):
        costs.note(1, 1.0, drafted=False)
        costs.note(2, 1.6, drafted=True)
    assert number(costs, 1, [0.3]) == 0
    assert number(costs, 1, [0.9]) == 1
    for _ in range(100):
        costs.note(1, 1.6, drafted=False)
    assert number(costs, 1, [0.3]) == 1


def test_draft_tokens_are_tried_again_when_steps_with_them_were_held_up() -> None:
    costs = StepCosts(FLAT)
    for _ in range(100):
        costs.note(2, 3.0, drafted=True)
    assert number(costs, 1, [0.5]) == 0
    steps = 0
    while not number(costs, 1, [0.5]):
        costs.note(1, 1.0, drafted=False)
        steps += 1
    assert 16 < steps < 512


def test_one_step_that_is_held_up_counts_little() -> None:
    costs = StepCosts(FLAT)
    costs.note(2, 50.0, drafted=True)
    assert number(costs, 1, [0.3]) == 1
    costs = StepCosts({2: 1.3}, {1: 1.0})
    for _ in range(2):
        costs.note(1, 50.0, drafted=False)
    assert number(costs, 1, [0.15]) == 0


def test_a_step_that_always_takes_longer_is_learned() -> None:
    costs = StepCosts(FLAT)
    for _ in range(100):
        costs.note(2, 5.0, drafted=True)
    assert number(costs, 1, [1.0]) == 0
    assert costs.fastest(1, gains_of([1.0] * 15))[0] > 4


def test_void_steps_do_not_keep_up_what_one_step_seemed_to_cost() -> None:
    costs = StepCosts(FLAT)
    for _ in range(100):
        costs.note(1, 2.0, drafted=False)
    assert number(costs, 1, [0.05]) == 1
    for _ in range(1000):
        costs.note_void()
    assert number(costs, 1, [0.05]) == 0


def test_a_check_of_few_tokens_costs_something_whatever_is_saved_of_many() -> None:
    costs = StepCosts({2: 1.0, 64: 40.0}, {1: 1.0, 64: 40.0}, {1: 0.1})
    for _ in range(100):
        costs.note(64, 30.0, drafted=True)
    assert costs.fastest(1, gains_of([0.5]), 0.1)[1] < 1.5


def test_step_costs_need_times() -> None:
    for bad in ({}, {0: 1.0}, {1: 0.0}):
        with pytest.raises(ValueError, match="step costs"):
            StepCosts(bad)


def started(prompts: list[list[int]], num_blocks: int = 100, **options: object) -> tuple[Scheduler, Step]:
    """Sequences that have been prefilled and got the token 1, and the step that comes then."""
    scheduler = Scheduler(BlockManager(num_blocks, 4), 32, 1000, min(400, num_blocks * 4))
    for prompt in prompts:
        scheduler.add(make_sequence(prompt, **{"max_tokens": 100, **options}))
    first = scheduler.schedule()
    scheduler.advance(first)
    scheduler.resolve(first, [1] * len(prompts))
    return scheduler, scheduler.schedule()


REPEATING = [7, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 7]


def test_draft_tokens_are_what_followed_and_take_blocks() -> None:
    scheduler, step = started([REPEATING, [5, 6, 8]])
    speculator = Speculator(StepCosts(FLAT), 400)
    drafts = speculator.plan(step)
    ((request_id, found),) = drafts.items()
    assert found == REPEATING[2 : 2 + len(found)]
    scheduler.schedule_drafts(step, drafts)
    assert step.drafts == drafts
    chunk = step.chunks[-1]
    assert (chunk.sequence.request_id, chunk.length, chunk.num_sampled) == (request_id, 1 + len(found), 1 + len(found))
    assert chunk.token_ids == [chunk.sequence.tokens[-1], *found]
    assert len(chunk.sequence.blocks) * 4 >= len(chunk.sequence.tokens) + len(found)
    assert (step.num_tokens, step.num_sampled, step.prefill_tokens) == (2 + len(found), 2, 0)


@pytest.mark.parametrize(
    ("num_accepted", "options", "added"),
    [(2, {}, 3), (0, {}, 1), (3, {"stop_token_ids": (51,)}, 2), (3, {"stop_token_ids": (51,), "min_tokens": 9}, 4)],
)
def test_a_sequence_gets_accepted_draft_tokens_up_to_its_end(
    num_accepted: int, options: dict[str, Any], added: int
) -> None:
    scheduler, step = started([REPEATING], **options)
    (sequence,) = step.sequences
    before, computed = list(sequence.tokens), sequence.num_computed
    scheduler.schedule_drafts(step, {sequence.request_id: [50, 51, 52]})
    scheduler.advance(step)
    assert sequence.num_computed == computed + 4
    step.chunks = [replace(chunk, num_accepted=num_accepted) for chunk in step.chunks]
    scheduler.resolve(step, [60])
    assert sequence.tokens == before + [*[50, 51, 52][:num_accepted], 60][:added]
    assert step.chunks[0].num_added == added
    assert sequence.num_computed == computed + added
    assert (sequence.finish_reason == "stop") == (added == 2)


def test_draft_tokens_take_no_block_that_a_sequence_may_need() -> None:
    scheduler, step = started([REPEATING], num_blocks=6)
    drafts = Speculator(StepCosts(FLAT), 24).plan(step)
    assert sum(map(len, drafts.values())) > 1
    scheduler.schedule_drafts(step, drafts)
    (sequence,) = (chunk.sequence for chunk in step.chunks)
    assert (len(sequence.tokens), len(sequence.blocks)) == (19, 5)
    assert [len(own) for own in step.drafts.values()] == [1]


@pytest.mark.parametrize("options", [{"speculation": False}, {"max_tokens": 2}])
def test_some_sequences_have_no_draft_tokens(options: dict[str, object]) -> None:
    _, step = started([REPEATING], **options)
    assert not Speculator(StepCosts(FLAT), 400).plan(step)


def test_no_more_draft_tokens_than_tokens_that_may_come() -> None:
    _, step = started([REPEATING], max_tokens=5)
    assert [len(own) for own in Speculator(StepCosts(FLAT), 400).plan(step).values()] == [3]


def test_with_more_sequences_draft_tokens_get_fewer_and_end() -> None:
    found = []
    for count in (1, 2, 4, 12, 16, 20):
        _, step = started([REPEATING] * count, num_blocks=400)
        drafts = Speculator(StepCosts(FLAT), 400).plan(step)
        found.append(sum(map(len, drafts.values())) / count)
    assert found == sorted(found, reverse=True)
    assert found[0] >= 7
    assert found[-2:] == [0, 0]


def test_accepted_draft_tokens_are_counted_by_place() -> None:
    speculator = Speculator(StepCosts(FLAT), 400)
    sequence = make_sequence([1, 2, 3])
    for drafted, accepted in ((3, 2), (1, 0), (2, 2)):
        speculator.count(sequence, drafted, accepted)
    assert (speculator.drafts, speculator.draft_tokens) == (3, 6)
    assert speculator.accepted == [2, 2, *[0] * (MAX_DRAFT_TOKENS - 2)]


def test_a_draft_model_and_its_method_belong_together() -> None:
    assert EngineConfig().speculation == "off"
    with pytest.raises(ConfigError, match=r"draft_model does not say which model proposes tokens"):
        load_config(None, {"engine.speculation": "draft"})
    for speculation in ("off", "lookup"):
        with pytest.raises(ConfigError, match=f"draft_model is set, and speculation is {speculation}"):
            load_config(None, {"engine.speculation": speculation, "engine.draft_model": "a/b"})
    assert load_config(None, {"engine.speculation": "draft", "engine.draft_model": "a/b"}).engine.draft_model == "a/b"


def test_what_a_draft_model_proposes_need_not_promise_as_much() -> None:
    flat = {1: 1.0, 2: 1.0}
    assert [number(StepCosts(flat), 1, [likely]) for likely in (0.08, 0.12)] == [0, 1]
    assert [number(StepCosts(flat, drafting={1: 1e-9}), 1, [likely]) for likely in (0.03, 0.08)] == [0, 1]
