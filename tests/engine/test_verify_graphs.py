"""Graphs of steps that check guesses, as far as they can be made without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from server.config import EngineConfig
from server.engine.runtime import runner as runner_module
from server.engine.runtime.batch import Batch, StepInput, batch_of
from server.engine.runtime.graphs import decode
from server.engine.runtime.graphs.async_step import Launch
from server.engine.runtime.graphs.verify import VerifyGraphs
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner, StepGraphs
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.scheduling.block_tables import BlockTables
from server.engine.scheduling.step import Chunk, Step
from tests.engine.factories import make_sequence
from tests.engine.models import tiny_model


def test_graphs_that_check_guesses_have_an_option_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option is what keeps their layers' code apart, which the slow test below shows."""
    asked: list[object] = []

    def noted(forward: Callable[..., object], **options: object) -> Callable[..., object]:
        asked.append(options["options"])
        return forward

    monkeypatch.setattr(torch, "compile", noted)
    for shared in (False, True):
        with decode._compiled_layers(tiny_model("llama", num_hidden_layers=1), True, shared):
            pass
    assert asked == [None, {"epilogue_fusion": config.epilogue_fusion}]


@pytest.mark.slow
def test_layers_are_compiled_apart_from_those_of_decode_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have the same number of tokens; decode graphs may leave the rotary embedding to the attention, these may not."""
    found: list[bool] = []

    class Noted(CustomGraphPass):
        def __init__(self, applies_rotary: bool) -> None:
            self._applies_rotary = applies_rotary

        def __call__(self, graph: torch.fx.Graph) -> None:
            found.append(self._applies_rotary)

        def uuid(self) -> None:
            return None

    @contextmanager
    def noting(applies_rotary: bool) -> Iterator[None]:
        with config.patch(post_grad_custom_pre_pass=Noted(applies_rotary)):
            yield

    monkeypatch.setattr(decode, "fused_operations", noting)
    model = tiny_model("llama", num_hidden_layers=1)
    ids = torch.arange(3, 11)[None]
    with torch.inference_mode(), config.patch(force_disable_caches=True):
        expected = model(input_ids=ids, use_cache=False).logits
        for applies_rotary, shared in ((True, False), (False, True), (True, False), (False, True)):
            with decode._compiled_layers(model, applies_rotary, shared):
                torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)
    assert found == [True, False]


class UncapturedGraphs(VerifyGraphs):
    """Takes steps of up to 4 tokens, as graphs of 2 and 4 do, and runs the model itself; sampled counts the steps."""

    def __init__(self, paged: PagedModel) -> None:
        self._paged = paged
        self._graphs = dict.fromkeys((2, 4))  # type: ignore[assignment]
        self._largest = 4
        self.sampled = 0

    def sample(self, step: Step, batch: Batch, launch: Launch) -> list[Sampled]:
        assert launch.table() is None
        self.sampled += 1
        return [Sampled(token) for token in self._paged.run(batch).argmax(-1).tolist()]


@pytest.mark.parametrize(("guesses", "fits"), [([7, 8], True), ([7, 8, 9], True), ([7, 8, 9, 10], False)])
def test_a_step_with_guesses_makes_one_batch(guesses: list[int], fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a step of more tokens than the largest graph, which the model's own code computes."""
    config = EngineConfig(block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=32, enforce_eager=True)
    plain = build_runner(tiny_model("llama"), config)
    graphs = UncapturedGraphs(plain._paged)
    runner = ModelRunner(plain._paged, plain.limits, graphs=StepGraphs(verify=graphs))
    sequence = make_sequence(6)
    sequence.tables = BlockTables(1, 8)
    sequence.row = sequence.tables.take([0, 1, 2])
    plain.execute(Step([Chunk(sequence, 0, 5, False)]))
    step = Step([Chunk(sequence, 5, 1, True)], guesses={sequence.request_id: guesses})
    expected = plain.execute(step)
    batches: list[int] = []

    def counted(given: StepInput, block_size: int, device: torch.device) -> Batch:
        batches.append(len(given.ids))
        return batch_of(given, block_size, device)

    monkeypatch.setattr(runner_module, "batch_of", counted)
    assert runner.execute(step) == expected
    assert batches == [1 + len(guesses)]
    assert graphs.sampled == fits
