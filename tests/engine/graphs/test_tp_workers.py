"""Steps that are launched with other ranks: these compute what rank 0 computes, and sample the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.grammar import Grammars
from server.engine.runtime.batch import Batch
from server.engine.runtime.graphs.graph_set import GraphSet, Tokens
from server.engine.runtime.graphs.launched_step import Launch
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner, StepGraphs
from server.engine.runtime.sampling.ops import largest_of_rows
from server.engine.runtime.sampling.sampler import ModelOutput
from server.engine.runtime.step_input import StepInput
from server.engine.scheduling.sequence import PLACEHOLDER
from tests.engine.factories import make_request, run_together, tokens
from tests.engine.models import tiny_model
from tests.engine.speculation.engines import GRAMMAR, VOCABULARY

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=32, max_num_seqs=6, enforce_eager=True)


class UncapturedGraphs(GraphSet):
    """Runs the model itself in the place of graphs; computed has the ids of each step."""

    def __init__(self, paged: PagedModel) -> None:
        self._paged = paged
        self.tokens, self._largest = Tokens.NEWEST, 8
        self.computed: list[list[int]] = []

    def run(self, batch: Batch, newest: torch.Tensor | None = None, source: list[int] | None = None) -> ModelOutput:
        ids = batch.ids
        if newest is not None:
            ids = torch.where(ids == PLACEHOLDER, newest if source is None else newest[source], ids)
        self.computed.append(ids.tolist())
        logits = self._paged.run(replace(batch, ids=ids))
        return ModelOutput(logits, largest_of_rows(logits), ids)


class OtherRank:
    """Another rank, in this process; launched counts the steps whose tokens it samples."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.launched = 0

    def compute(self, given: StepInput, launch: Launch | None = None) -> None:
        self.launched += launch is not None
        self._runner.compute_as_worker(given, launch)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        yield


def make_ranks(patch: pytest.MonkeyPatch) -> tuple[ModelRunner, UncapturedGraphs, OtherRank, UncapturedGraphs]:
    """Rank 0's runner and its graphs, the other rank and its graphs."""
    plain, same = (build_runner(tiny_model("llama", vocab_size=VOCABULARY), CONFIG) for _ in range(2))
    graphs, others = UncapturedGraphs(plain._paged), UncapturedGraphs(same._paged)
    other = OtherRank(ModelRunner(same._paged, same.limits, graphs=StepGraphs(decode=others)))
    runner = ModelRunner(plain._paged, plain.limits, graphs=StepGraphs(decode=graphs), workers=other)
    patch.setattr(UncapturedGraphs, "pool", property(lambda _: None), raising=False)
    patch.setattr(ModelRunner, "graph_replays", 0)
    return runner, graphs, other, others


def test_other_ranks_compute_the_same_tokens(embedded_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        make_request(5, max_tokens=20),
        make_request(9, max_tokens=18, temperature=0.8, top_p=0.9, seed=3),
        make_request(3, max_tokens=8, repetition_penalty=1.3, logprobs=2),
        make_request(7, max_tokens=6, grammar=GRAMMAR, temperature=0.7, seed=5),
    ]
    grammars = Grammars(embedded_folder, VOCABULARY, 2)
    plain = build_runner(tiny_model("llama", vocab_size=VOCABULARY), CONFIG)
    expected = run_together(Engine(plain, CONFIG, grammars), *requests)
    runner, graphs, other, others = make_ranks(monkeypatch)
    found = run_together(Engine(runner, CONFIG, grammars), *requests)
    for request in requests:
        assert tokens(found[request.request_id]) == tokens(expected[request.request_id])
    # With the options of some requests rank 0 samples alone, and each step has the tokens of the one before.
    assert 5 < other.launched < len(graphs.computed) - 5
    assert others.computed == graphs.computed
    assert not any(PLACEHOLDER in ids for ids in graphs.computed)
