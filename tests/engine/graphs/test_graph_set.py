"""Graphs of every kind of step, captured and replayed without a GPU: they compute what the model does without graphs.

What stands for a graph is the function that was captured, which runs again at each replay and leaves its results where the
first run left them. So it reads what a graph reads: the inputs and the layout that the latest plan has written.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from server.config import EngineConfig
from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions
from server.engine.runtime.attention.graph_backend import GraphBackend
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.graphs import graph_set
from server.engine.runtime.graphs.graph_set import Form, GraphSet, Tokens, chunk_sizes, long_chunk_forms
from server.engine.runtime.graphs.invariant import run_in_groups
from server.engine.runtime.graphs.pool import CapturedStep
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.preparation.trial_steps import TrialSteps
from tests.engine.graphs.test_graph_inputs import PoolOnHost
from tests.engine.models import tiny_model

BLOCK, VOCABULARY = 4, 64
ROOM = 20
"""KV blocks that each sequence of a step has room for."""


class Again(CapturedStep):
    def __init__(self, forward: Callable[[], tuple[torch.Tensor, ...]], results: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self._forward, self._results = forward, results

    def replay(self) -> None:
        for result, found in zip(self._results, self._forward(), strict=True):
            result.copy_(found)


class Pool(PoolOnHost):
    """Its captures compute again what was captured."""

    def new_inputs(self, size: int) -> torch.Tensor:
        inputs = torch.zeros(3, size, dtype=torch.int64)
        inputs[2] = self._scratch_slot
        return inputs

    def capture(self, forward: Callable[[], Any], warm_ups: int) -> tuple[CapturedStep, Any]:
        results = forward()
        return Again(forward, results), results


class Backend(GraphBackend):
    """Attends by a backend of steps without graphs, over the layout that was planned last."""

    def __init__(self, inner: AttentionBackend, scratch_block: int) -> None:
        self._inner = inner
        self.scratch_block = scratch_block
        self._planned = Spans.of([])

    def set_up_graphs(self, *_: object) -> None:
        raise AssertionError

    def plan_decode_graph(self, spans: Spans, size: int, shared: bool = False) -> None:
        padding = [Span(0, 0, 1, (self.scratch_block,))] * (size - len(spans))
        self._planned = Spans.of([*spans, *padding])

    def begin_decode_graph(self, slots: torch.Tensor, shared: bool = False) -> None:
        self._begin(slots)

    def plan_mixed_graph(self, spans: Spans, size: int, sequences: int) -> object:
        left = size - int(spans.lengths.sum())
        padding = [Span(0, 0, left, (self.scratch_block,) * -(-left // BLOCK))] if left else []
        self._planned = Spans.of([*spans, *padding])
        return sequences

    def begin_mixed_graph(self, slots: torch.Tensor, plan: object) -> None:
        assert isinstance(plan, int)
        self._begin(slots)

    def _begin(self, slots: torch.Tensor) -> None:
        spans = self._planned
        singles = 0
        while singles < len(spans) and spans.lengths[singles] == 1:
            singles += 1
        self._inner.begin(Batch(slots, slots, slots, slots, spans, singles))

    def begin(self, batch: Batch) -> None:
        raise AssertionError

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        return self._inner.attend(layer, query, key, value, options)


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> PagedModel:
    monkeypatch.setattr(graph_set, "unowned", lambda tensor: tensor)
    config = EngineConfig(block_size=BLOCK, kv_cache_bytes=2**20, max_num_batched_tokens=256, enforce_eager=True)
    paged = build_runner(tiny_model("llama", vocab_size=VOCABULARY), config)._paged
    paged.small_steps = None
    return paged


def captured(paged: PagedModel, tokens: Tokens, sizes: list[int], scratch: int = 90, **options: Any) -> GraphSet:
    """Graphs of these sizes, whose padding goes to the KV block `scratch`."""
    pool = Pool()
    pool._scratch_slot, pool._padding[2] = scratch * BLOCK, scratch * BLOCK
    graphs = GraphSet(paged.model, Backend(paged.backend, scratch), BLOCK, None, tokens, pool=pool, **options)
    with torch.inference_mode():
        graphs.capture(sizes, lambda *_: None)
    return graphs


def make_batch(paged: PagedModel, seed: int, parts: list[tuple[int, int]], every_row: bool) -> Batch:
    """A step of parts (start, length), each a sequence whose tokens up to start are in the cache."""
    chance = random.Random(seed)
    spans, ids, positions, slots, last = [], list[int](), list[int](), list[int](), []
    for number, (start, length) in enumerate(parts):
        blocks = range(ROOM * number, ROOM * number - (-(start + length) // BLOCK))
        spans.append(Span(len(ids), start, length, blocks))
        if start:
            before = torch.tensor([chance.randrange(VOCABULARY) for _ in range(start)])
            own = Spans.of([Span(0, 0, start, blocks[: -(-start // BLOCK)])])
            at = torch.arange(start)
            paged.run(Batch(before, at, at + blocks[0] * BLOCK, at[-1:], own, int(start == 1)))
        ids += [chance.randrange(VOCABULARY) for _ in range(length)]
        positions += range(start, start + length)
        slots += [blocks[0] * BLOCK + place for place in range(start, start + length)]
        last.append(len(ids) - 1)
    wanted = list(range(len(ids))) if every_row else last
    singles = sum(length == 1 for _, length in parts)
    return Batch(*map(torch.tensor, (ids, positions, slots, wanted)), Spans.of(spans), singles)


DECODE = [[(5, 1)], [(7, 1), (2, 1), (12, 1)], [(3, 1), (9, 1)]]
DRAFTED = [[(6, 1), (5, 3)], [(8, 4)], [(2, 1), (3, 2), (9, 3)]]
CHUNKS = [[(0, 7)], [(0, 30), (4, 34)], [(9, 1), (3, 1), (4, 11), (0, 5)], [(2, 65), (0, 20)]]


@pytest.mark.parametrize(
    ("tokens", "sizes", "steps"),
    [
        (Tokens.NEWEST, [1, 2, 4], DECODE),
        (Tokens.DRAFTED, [2, 4, 8], DRAFTED),
        (Tokens.CHUNKS, chunk_sizes(100), CHUNKS),
    ],
)
@torch.inference_mode()
def test_replays_compute_what_steps_without_graphs_do(
    paged: PagedModel, tokens: Tokens, sizes: list[int], steps: list[list[tuple[int, int]]]
) -> None:
    graphs = captured(paged, tokens, sizes, max_num_seqs=6)
    assert graphs.sizes == sizes
    for seed, parts in enumerate(steps):
        batch = make_batch(paged, seed, parts, tokens is Tokens.DRAFTED)
        assert graphs.fits(batch)
        # The graph first, so that the other run's keys and values cannot stand in for its own.
        output = graphs.run(batch)
        expected = paged.run(batch)
        torch.testing.assert_close(output.logits.float(), expected, rtol=1e-4, atol=1e-4)
        if tokens is not Tokens.CHUNKS:
            assert output.greedy is not None
            assert torch.equal(output.greedy[1], expected.argmax(-1))
    assert graphs.pool.replays == len(steps)


@pytest.mark.parametrize("tokens", Tokens)
def test_a_capture_holds_no_kv_blocks(tokens: Tokens, paged: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend has room for sequences of the longest context, which may have fewer tokens than a graph."""
    planned = []
    for name in ("plan_decode_graph", "plan_mixed_graph"):
        plan = getattr(Backend, name)
        monkeypatch.setattr(
            Backend, name, lambda *given, plan=plan: (planned.append(int(given[1].counts.sum())), plan(*given))[1]
        )
    captured(paged, tokens, [2, 64], max_num_seqs=6)
    assert planned == [0, 0]


@torch.inference_mode()
def test_chunks_go_on_from_the_states_that_graphs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_set, "unowned", lambda tensor: tensor)
    config = EngineConfig(block_size=BLOCK, kv_cache_bytes=2**20, max_num_batched_tokens=512, enforce_eager=True)
    paged = build_runner(tiny_model("qwen3_5_text", vocab_size=VOCABULARY), config)._paged
    assert paged.states is not None
    pool, steps = paged.states.pool, TrialSteps(paged)
    graphs = captured(paged, Tokens.CHUNKS, [64], max_num_seqs=6, states=pool)
    assert not graphs.fits(steps.first_chunk(65))
    expected = steps.run(50)
    for ends in ((50,), (3, 50), (17, 44, 50)):
        for end, part in zip(ends, steps.in_chunks(*ends), strict=True):
            last = replace(part, sampled_rows=part.sampled_rows[-1:])
            assert graphs.fits(last)
            logits = graphs.run(last).logits
            torch.testing.assert_close(logits.float(), expected[end - 1 : end], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_step_with_adapters_has_a_graph_that_is_told_whose_they_are(paged: PagedModel) -> None:
    graphs = captured(paged, Tokens.NEWEST, [2, 4], adapter_slots=2)
    batch = make_batch(paged, 1, [(7, 1), (2, 1), (12, 1)], every_row=False)
    adapted = Spans.of(replace(span, adapter=slot) for span, slot in zip(batch.spans, (1, None, 0), strict=True))
    expected = paged.run(batch)
    for spans, others in ((batch.spans, None), (adapted, [[1, 0], [1, 1], [0, 1], [1, 1]]), (batch.spans, None)):
        # The model has no adapters, so both graphs compute the same.
        logits = graphs.run(replace(batch, spans=spans)).logits
        torch.testing.assert_close(logits.float(), expected, rtol=1e-4, atol=1e-4)
        assert graphs._last is not None
        found = graphs._last.others
        assert (None if found is None else found.int().tolist()) == others


@torch.inference_mode()
def test_tokens_of_any_batch_in_groups_are_the_models(paged: PagedModel) -> None:
    graphs = captured(paged, Tokens.NEWEST, [32])
    batch = make_batch(paged, 3, [(7, 1), (5, 34)], every_row=False)
    logits = torch.empty(2, VOCABULARY)
    run_in_groups(batch, lambda group: graphs.run(group).logits, BLOCK, logits)
    torch.testing.assert_close(logits, paged.run(batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "parts", "every_row", "fits"),
    [
        (Tokens.NEWEST, [(5, 1)] * 4, False, True),
        (Tokens.NEWEST, [(5, 1)] * 5, False, False),
        (Tokens.NEWEST, [(5, 1), (5, 2)], False, False),
        (Tokens.DRAFTED, [(5, 1), (5, 3)], True, True),
        (Tokens.DRAFTED, [(5, 1), (5, 3)], False, False),
        (Tokens.DRAFTED, [(5, 5)], True, False),
        (Tokens.CHUNKS, [(5, 1), (0, 3)], False, True),
        (Tokens.CHUNKS, [(5, 1), (5, 1), (0, 2)], False, False),
        (Tokens.CHUNKS, [(0, 3)], True, True),
        (Tokens.CHUNKS, [(0, 5)], False, False),
    ],
)
def test_a_step_fits_the_graphs_that_compute_all_it_asks_for(
    tokens: Tokens, parts: list[tuple[int, int]], every_row: bool, fits: bool
) -> None:
    """Graphs of up to 4 tokens, with chunks of up to 2 sequences."""
    graphs = GraphSet.__new__(GraphSet)
    vars(graphs).update(tokens=tokens, _graphs=dict.fromkeys(map(Form, (2, 4))), _largest=4)
    vars(graphs).update(_max_num_seqs=2, _states=None)
    spans = Spans.of(Span(0, start, length, range(3)) for start, length in parts)
    count = int(spans.lengths.sum())
    rows = torch.arange(count) if every_row else torch.arange(len(parts))
    batch = Batch(*[torch.zeros(count, dtype=torch.int64)] * 3, rows, spans, sum(length == 1 for _, length in parts))
    assert graphs.fits(batch) == fits
    if tokens is Tokens.CHUNKS:
        adapted = Spans.of(replace(span, adapter=1) for span in spans)
        assert not graphs.fits(replace(batch, spans=adapted))


def test_a_step_of_more_sequences_takes_the_next_graph_with_room_for_them() -> None:
    states = Mock()
    states.is_long.return_value = True
    graphs = GraphSet.__new__(GraphSet)
    vars(graphs).update(tokens=Tokens.CHUNKS, _max_num_seqs=40, _states=states, _largest=1024)
    vars(graphs).update(_graphs=dict.fromkeys([Form(1024), *long_chunk_forms(1000, 40, is_mixture=False)]))
    for tokens, sequences, expected in (
        (300, 8, Form(384, True, 8)),
        (300, 9, Form(512, True, 32)),
        (600, 8, Form(640, True, 8)),
        (600, 32, Form(1024, True, 32)),
        (600, 33, None),
    ):
        spans = Spans.of([Span(0, 0, 1, ())] * (sequences - 1) + [Span(0, 0, tokens - sequences + 1, ())])
        batch = Batch(*[torch.zeros(tokens, dtype=torch.int64)] * 4, spans, sequences - 1)
        assert graphs._form(batch) == expected


def test_mixtures_have_larger_graphs_of_long_chunks() -> None:
    assert [form.size for form in long_chunk_forms(4096, 8, is_mixture=False)] == [384, 512, 640, 768, 1024]
    forms = long_chunk_forms(2000, 64, is_mixture=True)
    assert [form.size for form in forms if form.sequences == 8] == [384, 512, 640, 768, 1024, 1536, 2048]
    assert [form.size for form in forms if form.sequences == 32] == [512, 1024, 2048]
    assert {form.sequences for form in long_chunk_forms(512, 4, is_mixture=False)} == {4}
