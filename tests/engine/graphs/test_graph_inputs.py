"""Inputs of a decode graph: a step's tokens, padding, and tokens of the step before that only the device knows.

Without a GPU; what stands for a graph computes from its inputs when it is replayed, as a graph does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from nf4_kernels.cuda.device_clock import DeviceClock
from server.engine.runtime.attention.graph_backend import GraphBackend
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.graphs.graph_set import Form, GraphSet, Tokens, _Graph
from server.engine.runtime.graphs.pool import CapturedStep, GraphPool
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.sampling.sampler import LaunchedSample, ModelOutput
from server.engine.runtime.speculation.draft_model import DraftGraphs, DraftModel
from server.engine.scheduling.block_tables import BlockTables
from server.engine.scheduling.sequence import PLACEHOLDER
from tests.engine.factories import make_sequence

VOCABULARY, SCRATCH = 50, 999


class PoolOnHost(GraphPool):
    """A pool whose device is the host."""

    def __init__(self) -> None:
        self.replays = 0
        self._scratch_slot = SCRATCH
        self._padding = np.array([[0], [0], [SCRATCH]])


class Replayed(CapturedStep):
    """Its likeliest token is that of the row's id, position and slot; it refuses ids that are no token."""

    def __init__(self, graph: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._graph = graph

    def replay(self) -> None:
        ids, positions, slots = self._graph["inputs"]
        assert ((ids >= 0) & (ids < VOCABULARY)).all()
        logits = self._graph["logits"]
        logits.zero_()
        logits[torch.arange(len(ids)), expected(ids, positions, slots)] = 3.0
        best, tokens = logits.max(dim=-1)
        self._graph["best"].copy_(best)
        self._graph["tokens"].copy_(tokens)


def expected(ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return (7 * ids + 3 * positions + slots) % VOCABULARY


def make_graphs(*sizes: int) -> tuple[GraphSet, PoolOnHost, list[int]]:
    """Graphs of these sizes, their pool, and the numbers of sequences that layouts were made for."""
    planned: list[int] = []
    pool, graphs = PoolOnHost(), GraphSet.__new__(GraphSet)

    def plan(spans: Spans, size: int, shared: bool) -> None:
        planned.append(len(spans))

    attributes: dict[str, Any] = {
        "_backend": cast(GraphBackend, SimpleNamespace(plan_decode_graph=plan)),
        "_graphs": {},
        "_adapted": {},
        "tokens": Tokens.NEWEST,
        "_largest": max(sizes),
        "_last": None,
        "_states": None,
        "pool": pool,
    }
    vars(graphs).update(attributes)
    for size in sizes:
        inputs, logits = torch.full((3, size), -7), torch.zeros(size, VOCABULARY)
        best, tokens = torch.zeros(size), torch.zeros(size, dtype=torch.int64)
        step = Replayed({"inputs": inputs, "logits": logits, "best": best, "tokens": tokens})
        graphs._graphs[Form(size)] = _Graph(step, inputs, ModelOutput(logits, (best, tokens), inputs[0]))
    return graphs, pool, planned


def make_batch(ids: list[int]) -> Batch:
    count = len(ids)
    spans = Spans.of(Span(row, 5 + row, 1, (row,)) for row in range(count))
    numbers = torch.arange(count)
    return Batch(torch.tensor(ids), numbers + 5, 11 * numbers + 2, numbers, spans, count)


@pytest.mark.parametrize("counts", [(4, 1, 3), (1, 2, 6, 5, 2)])
def test_a_graph_computes_the_batch_whatever_steps_ran_before(counts: tuple[int, ...]) -> None:
    graphs, pool, planned = make_graphs(2, 4, 8)
    for number, count in enumerate(counts):
        batch = make_batch([(13 * number + 5 * row) % VOCABULARY for row in range(count)])
        logits = graphs.run(batch).logits
        assert logits.shape == (count, VOCABULARY)
        assert torch.equal(logits.argmax(-1), expected(batch.ids, batch.positions, batch.slots))
        assert planned[-1] == count
        inputs = graphs._last.inputs if graphs._last else torch.empty(0)
        assert (inputs[2, count:] == SCRATCH).all()
    assert pool.replays == len(counts)


@pytest.mark.parametrize("source", [None, [2, 0, 1]])
def test_tokens_of_the_step_before_take_the_places_of_unknown_ones(source: list[int] | None) -> None:
    graphs, _, _ = make_graphs(4)
    # The step before leaves unknown tokens in more places than the next one has.
    graphs.run(make_batch([PLACEHOLDER] * 4), torch.tensor([20, 21, 22, 23]))
    newest = torch.tensor([30, 31, 32])
    batch = make_batch([PLACEHOLDER, 9, PLACEHOLDER])
    output = graphs.run(batch, newest, source)
    assert output.greedy is not None
    assert output.newest is not None
    best, tokens = output.greedy
    ids = torch.tensor([30, 9, 32] if source is None else [32, 9, 31])
    assert tokens.tolist() == expected(ids, batch.positions, batch.slots).tolist()
    assert output.newest.tolist() == ids.tolist()
    assert best.tolist() == [3.0] * 3
    assert batch.ids.tolist() == [PLACEHOLDER, 9, PLACEHOLDER]


@pytest.mark.parametrize("advances", [True, False])
def test_draft_tokens_outlive_the_replays_behind_them(advances: bool) -> None:
    graphs, _, _ = make_graphs(2, 4)

    def advance(inputs: torch.Tensor, tokens: torch.Tensor) -> bool:
        count = len(tokens)
        if advances:
            inputs[0, :count] = tokens
            inputs[1:, :count] += 1
        return advances

    graphs._backend = cast(
        GraphBackend, SimpleNamespace(plan_decode_graph=lambda *_: None, advance_decode_graph=advance)
    )
    paged = SimpleNamespace(block_size=64, vocab_size=VOCABULARY)
    draft = DraftModel(cast(PagedModel, paged), VOCABULARY, 99, DraftGraphs(graphs, None))
    tables, sequences = BlockTables(3, 4), []
    for row in range(3):
        sequence = make_sequence(5 + row)
        sequence.tables, sequence.row = tables, tables.take([7 * row + 2])
        sequences.append(sequence)
    counts = [4, 4, 2]
    launched = draft.propose([(own, len(own.tokens) - 1, count) for own, count in zip(sequences, counts, strict=True)])
    assert launched is not None
    drafts = launched.read()
    for index, sequence in enumerate(sequences):
        token, found = torch.tensor(sequence.tokens[-1] % VOCABULARY), []
        for place in range(counts[index]):
            at = torch.tensor(len(sequence.tokens) - 1 + place)
            token = expected(token, at, (7 * index + 2) * 64 + at)
            found.append(int(token))
        assert drafts[sequence.request_id] == found


def test_a_clocks_totals_come_with_the_tokens() -> None:
    totals = torch.tensor([[2**62 + 1, -1, 5], [3, 2**31, 0x7FA00000]])
    noted: list[torch.Tensor] = []
    clock = cast(DeviceClock, SimpleNamespace(totals=totals, note=noted.append))
    sequences = [make_sequence(3), make_sequence(4), make_sequence(5)]
    best, tokens = torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([2**24 - 1, 3, 0])
    results = LaunchedSample(sequences, best, tokens, {2: "no"}, clock).read()
    assert [(result.token, result.error) for result in results] == [
        (2**24 - 1, None),
        (0, "the model's logits are not numbers"),
        (0, "no"),
    ]
    assert [own.tolist() for own in noted] == [totals.tolist()]


@pytest.mark.gpu
def test_results_of_many_steps_reach_the_host_in_order() -> None:
    launched: list[LaunchedSample] = []
    best, tokens = torch.zeros(600, device="cuda"), torch.zeros(600, dtype=torch.int64, device="cuda")
    for step in range(40):
        count = 1 + step * 97 % 600
        tokens.fill_(step)
        best.fill_(-step)
        launched.append(LaunchedSample([make_sequence(1)] * count, best[:count], tokens[:count], {}))
        if step:
            # The step before is read after the launch of this one.
            assert {result.token for result in launched[-2].read()} == {step - 1}
            assert set(launched[-2].tokens.tolist()) == {step - 1}
