"""Guesses that are made before the model's tokens are read: as right as others, and sampled with the same numbers.

The kernels that lay them out are in test_advance_kernel.py, the launches on a GPU in test_speculation_cuda.py.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.sampling.inverse_cdf import sampling_table
from server.engine.runtime.speculation.draft_model import DraftModel
from server.engine.runtime.speculation.draft_model_ahead import _Tables
from server.engine.runtime.speculation.verification import SequenceAhead
from server.engine.scheduling.sequence import PLACEHOLDER, Sequence
from tests.engine.factories import make_request, run_together, tokens
from tests.engine.models import tiny_model
from tests.engine.speculation.guessing import AheadDraftModel, LaunchingRunner
from tests.engine.speculation.test_drafts import CHEAP
from tests.engine.speculation.test_speculator import started


def make_engine(model: Any, blocks: int = 400) -> tuple[Engine, AheadDraftModel]:
    config = EngineConfig(
        device="cpu", block_size=4, max_num_batched_tokens=64, max_num_seqs=6, max_model_len=200, enforce_eager=True,
        speculation="draft", draft_model="-",
    ).model_copy(update={"kv_cache_bytes": 2 * 768 * 4 * blocks})  # fmt: skip
    built = build_runner(copy.deepcopy(model), config, draft=copy.deepcopy(model))
    runner = LaunchingRunner(built._paged, built.limits)
    assert isinstance(built.draft_model, DraftModel)
    runner.draft_model = AheadDraftModel.of(built.draft_model)
    runner.step_costs = built.step_costs
    engine = Engine(runner, config)
    assert engine._speculator is not None
    engine._speculator.costs = CHEAP
    return engine, runner.draft_model


@pytest.mark.parametrize("blocks", [400, 80])
def test_a_model_that_drafts_for_itself_is_right_ahead_too(blocks: int) -> None:
    """With 80 blocks sequences are preempted, and there is not always room for guesses."""
    model = tiny_model("llama")
    off = EngineConfig(kv_cache_bytes=2**21, enforce_eager=True)
    plain = Engine(build_runner(copy.deepcopy(model), off), off)
    engine, draft = make_engine(model, blocks)
    options: list[dict[str, Any]] = [
        {}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_p": 0.7, "top_k": 30, "seed": 6},
        {"max_tokens": 9}, {"max_tokens": 131},
    ]  # fmt: skip
    asked = [make_request(9 + 7 * i, **{"max_tokens": 120, "ignore_eos": True, **o}) for i, o in enumerate(options)]
    expected, got = run_together(plain, *asked), run_together(engine, *asked)
    for request in asked:
        assert tokens(got[request.request_id]) == tokens(expected[request.request_id])
    stats = engine.stats()
    assert (stats.preemptions > 0) == (blocks < 400)
    assert sum(stats.accepted_by_place) >= 0.97 * stats.draft_tokens > 100
    assert draft.used > 8
    assert stats.kv_blocks_used == 0


def test_guesses_ahead_take_all_their_blocks_or_none() -> None:
    scheduler, step = started([[5] * 9, [6] * 3], num_blocks=8)
    one, other = (chunk.sequence for chunk in step.chunks)
    assert (len(one.tokens), len(one.blocks), len(other.tokens), len(other.blocks)) == (10, 3, 4, 1)
    assert one.tables is not None
    # Four blocks are free, and each running sequence keeps one.
    assert not scheduler.reserve_ahead({one: 3, other: 9})
    assert (len(one.blocks), len(other.blocks)) == (3, 1)
    assert scheduler.reserve_ahead({one: 3, other: 4})
    assert (len(one.blocks), len(other.blocks)) == (4, 2)
    assert one.tables.counts[[one.row, other.row]].tolist() == [4, 2]
    assert one.tables.blocks[other.row, :2].tolist() == other.blocks
    # What has its blocks already needs none.
    assert not scheduler.reserve_ahead({one: 7})
    assert scheduler.reserve_ahead({one: 6, other: 4})


def test_numbers_that_sample_guesses_are_those_of_the_places_where_they_come_to_be() -> None:
    given: list[dict[str, Any]] = [
        {"temperature": 0.7, "seed": 3}, {}, {"temperature": 1.1, "seed": 4, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.2, "seed": 5, "min_p": 0.1},
    ]  # fmt: skip
    waiting = [Sequence(make_request([5] * (7 + 3 * i), str(i), **options), 11 + i) for i, options in enumerate(given)]
    later = copy.deepcopy(waiting)
    shifts = [2, 1, 0, 8]
    for sequence, ahead, shift in zip(waiting, later, shifts, strict=True):
        sequence.tokens.append(PLACEHOLDER)
        ahead.tokens += [6] * (shift + 1)
    tables = _Tables(waiting, 1000, 12, torch.tensor(shifts))
    for place in range(4):
        for going in range(1, 5):
            expected = sampling_table([SequenceAhead(own, place) for own in later[:going]], 1000)
            found = tables.of(place, going)
            assert expected is not None
            assert found is not None
            assert np.array_equal(found.numpy(), expected)
    assert _Tables(waiting[1:], 1000, 12, torch.tensor(shifts[1:])).of(0, 1) is None
