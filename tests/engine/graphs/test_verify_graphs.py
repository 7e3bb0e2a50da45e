"""Graphs of steps with draft tokens, as far as they can be made without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from server.config import EngineConfig
from server.engine.runtime.batch import Batch
from server.engine.runtime.exchange import ExchangeError
from server.engine.runtime.graphs.cuts import cut_layers
from server.engine.runtime.graphs.graph_set import Form, GraphSet, Tokens
from server.engine.runtime.graphs.launched_step import Launch
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner, StepGraphs
from server.engine.runtime.sampling.sampler import ModelOutput
from server.engine.runtime.speculation.launched_drafts import LaunchedDrafts
from server.engine.runtime.step_input import StepInput
from server.engine.scheduling.block_tables import BlockTables
from server.engine.scheduling.sequence import PLACEHOLDER, Sequence
from server.engine.scheduling.step import Chunk, Drafts, Step
from tests.engine.factories import make_sequence
from tests.engine.models import tiny_model


class UncapturedGraphs(GraphSet):
    """Takes steps of up to 4 tokens, as graphs of 2 and 4 do, and runs the model itself; replayed has their tokens."""

    def __init__(self, paged: PagedModel) -> None:
        self._paged = paged
        self._graphs = dict.fromkeys(map(Form, (2, 4)))  # type: ignore[assignment]
        self.tokens, self._largest = Tokens.DRAFTED, 4
        self.replayed: list[int] = []

    def run(self, batch: Batch, newest: torch.Tensor | None = None, source: list[int] | None = None) -> ModelOutput:
        self.replayed.append(batch.num_tokens)
        if newest is not None:
            given = newest if source is None else newest[source]
            torch.where(batch.ids == PLACEHOLDER, given, batch.ids, out=batch.ids)
        return ModelOutput(self._paged.run(batch))


@pytest.fixture
def plain() -> ModelRunner:
    """A runner without graphs."""
    config = EngineConfig(block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=32, enforce_eager=True)
    return build_runner(tiny_model("llama"), config)


def with_graphs(plain: ModelRunner, workers: Any = None) -> tuple[ModelRunner, UncapturedGraphs]:
    """A runner of the same model and cache with graphs of steps with draft tokens."""
    graphs = UncapturedGraphs(plain._paged)
    return ModelRunner(plain._paged, plain.limits, graphs=StepGraphs(verify=graphs), workers=workers), graphs


def prefilled(plain: ModelRunner, **options: Any) -> Sequence:
    """A sequence of 6 tokens, of which the last one alone is still to be computed."""
    sequence = make_sequence(6, **options)
    sequence.tables = BlockTables(1, 8)
    sequence.row = sequence.tables.take([0, 1, 2])
    plain.execute(Step([Chunk(sequence, 0, 5, False)]))
    return sequence


def drafted(sequences: list[Sequence], drafts: Drafts) -> Step:
    """A step of the newest tokens of sequences, and draft tokens."""
    step = Step([Chunk(sequence, len(sequence.tokens) - 1, 1, True) for sequence in sequences])
    step.schedule_drafts(drafts)
    return step


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"presence_penalty": 0.5}])
@pytest.mark.parametrize(("drafts", "fits"), [([7, 8], True), ([7, 8, 9], True), ([7, 8, 9, 10], False)])
def test_a_step_with_draft_tokens_is_computed_once(
    drafts: list[int], fits: bool, options: dict[str, Any], plain: ModelRunner
) -> None:
    """Also a step of more tokens than the largest graph, which the model's own code computes."""
    runner, graphs = with_graphs(plain)
    sequence = prefilled(plain, **options)
    step = drafted([sequence], {sequence.request_id: drafts})
    expected = plain.execute(step)
    launched = runner.execute_async(step, None)
    assert (launched is not None) == fits
    assert (runner.execute(step) if launched is None else launched.read()) == expected
    assert graphs.replayed == ([1 + len(drafts)] if fits else [])


@pytest.mark.parametrize("fits", [True, False])
def test_draft_tokens_that_only_the_device_knows_are_those_of_their_sequences(fits: bool, plain: ModelRunner) -> None:
    """Of three sequences the first has none, the second one, the third two, or three, which no graph can take."""
    runner, graphs = with_graphs(plain)
    graphs._largest = 6
    tables = BlockTables(3, 8)
    sequences = [make_sequence(length, request_id=f"r{length}") for length in (4, 5, 6)]
    for number, sequence in enumerate(sequences):
        sequence.tables, sequence.row = tables, tables.take([3 * number, 3 * number + 1, 3 * number + 2])
        plain.execute(Step([Chunk(sequence, 0, len(sequence.tokens) - 1, False)]))
    drafts = {"r5": [7], "r6": [8, 9] if fits else [8, 9, 10]}
    expected = plain.execute(drafted(sequences, drafts))
    columns = [torch.tensor(column) for column in ([8, 7], [9], [10])[: len(drafts["r6"])]]
    step = drafted(sequences, {name: [PLACEHOLDER] * len(own) for name, own in drafts.items()})
    step.unread = LaunchedDrafts([sequences[2], sequences[1]], columns)
    graphs._graphs = dict.fromkeys(map(Form, (2, 4, 6)))  # type: ignore[assignment]
    graphs._graphs = graphs._graphs if fits else dict.fromkeys(map(Form, (2, 4)))  # type: ignore[assignment]
    launched = runner.execute_async(step, None)
    assert (launched is not None) == fits
    found = runner.execute(step) if launched is None else launched.read()
    assert found == expected
    assert graphs.replayed == ([6] if fits else [])
    assert step.drafts == drafts
    assert step.unread is None


class OtherRank:
    """Do as TP workers do: compute the columns of each step with graphs of their own."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.is_waited_for = False
        self.ids: list[list[int]] = []

    def compute(self, given: StepInput, launch: Launch | None = None) -> None:
        assert launch is None
        assert not self.is_waited_for
        self.ids.append(given.ids)
        self._runner.compute_as_worker(given, launch)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.is_waited_for = True
        yield
        self.is_waited_for = False


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("fits", [True, False])
def test_other_ranks_verify_draft_tokens_by_the_same_graphs(unread: bool, fits: bool, plain: ModelRunner) -> None:
    """Also those that only this rank's device knows: they are read before the others get the step."""
    worker, others = with_graphs(plain)
    runner, graphs = with_graphs(plain, other := OtherRank(worker))
    sequence = prefilled(plain)
    drafts = [7, 8, 9] if fits else [7, 8, 9, 10]
    expected = plain.execute(drafted([sequence], {sequence.request_id: drafts}))
    step = drafted([sequence], {sequence.request_id: [PLACEHOLDER] * len(drafts) if unread else drafts})
    if unread:
        step.unread = LaunchedDrafts([sequence], [torch.tensor([token]) for token in drafts])
    assert runner.execute(step) == expected
    assert other.ids == [[sequence.tokens[5], *drafts]]
    assert graphs.replayed == others.replayed == ([4] if fits else [])
    assert not other.is_waited_for


def test_a_rank_that_fails_while_others_verify_draft_tokens_ends_the_group(
    monkeypatch: pytest.MonkeyPatch, plain: ModelRunner
) -> None:
    runner, graphs = with_graphs(plain, OtherRank(plain))
    sequence = prefilled(plain)

    def broken(*_: object) -> ModelOutput:
        raise RuntimeError("no graph")

    monkeypatch.setattr(graphs, "run", broken)
    with pytest.raises(ExchangeError, match="rank 0 failed in a step: RuntimeError: no graph"):
        runner.execute(drafted([sequence], {sequence.request_id: [7]}))


@pytest.mark.parametrize(("layers", "behind"), [(1, []), (6, [1]), (35, [1, 6]), (65, [2, 11])])
def test_a_step_that_is_waited_for_is_cut_behind_its_first_layers(layers: int, behind: list[int]) -> None:
    model = tiny_model("llama", num_hidden_layers=layers)
    done: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: done.append(index))
    cuts: list[list[int]] = []
    ids = torch.arange(3, 8)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        done.clear()
        with cut_layers(model, lambda: cuts.append(list(done))):
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    assert cuts == [list(range(count)) for count in behind]
