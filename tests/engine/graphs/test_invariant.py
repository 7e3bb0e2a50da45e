"""Batches cut into groups of single tokens, and who may ask for them."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from server.config import EngineConfig
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.graphs.invariant import INVARIANT_ROWS, in_groups
from server.engine.runtime.limits import EngineConfigError
from server.engine.runtime.preparation import assembly, graph_capture
from server.engine.runtime.preparation.assembly import build_runner
from tests.engine.models import tiny_model


def test_groups_hold_every_token_once_with_the_keys_before_it() -> None:
    spans = Spans.of([Span(0, 9, 1, (7, 3, 5)), Span(1, 2, 6, (4, 1), adapter=2)])
    ids = torch.tensor([50, 60, 61, 62, 63, 64, 65])
    positions = torch.tensor([9, 2, 3, 4, 5, 6, 7])
    slots = torch.tensor([21, 18, 19, 4, 5, 6, 7])
    batch = Batch(ids, positions, slots, torch.tensor([0, 6]), spans, 1)
    groups = list(in_groups(batch, block_size=4, size=3))
    assert [first for first, _ in groups] == [0, 3, 6]
    for name in ("ids", "positions", "slots"):
        assert torch.equal(torch.cat([getattr(group, name) for _, group in groups]), getattr(batch, name))
    singles = [span for _, group in groups for span in group.spans]
    assert [(span.start, span.length) for span in singles] == [(int(p), 1) for p in positions]
    assert [tuple(span.blocks) for span in singles] == [(7, 3, 5), (4,), (4,), (4, 1), (4, 1), (4, 1), (4, 1)]
    assert [span.adapter for span in singles] == [None, *[2] * 6]
    assert all(group.num_single == len(group.spans) == len(group.sampled_rows) for _, group in groups)


@pytest.mark.parametrize("eager", [False, True])
def test_it_needs_cuda(eager: bool) -> None:
    config = EngineConfig(device="cpu", max_model_len=64, batch_invariant=True, enforce_eager=eager)
    with pytest.raises(EngineConfigError, match="batch_invariant needs CUDA"):
        build_runner(tiny_model("qwen3"), config)


def test_it_needs_a_backend_with_graphs() -> None:
    config = EngineConfig(device="cpu", max_model_len=64, enforce_eager=True)
    runner = build_runner(tiny_model("qwen3"), config)
    invariant = config.model_copy(update={"batch_invariant": True})
    with pytest.raises(EngineConfigError, match="batch_invariant needs CUDA graphs"):
        assembly._capture_steps(runner._paged, runner.limits, invariant, lambda *_: None, [])


@pytest.mark.parametrize("max_num_seqs", [3, INVARIANT_ROWS + 8])
def test_graphs_have_room_for_all_running_sequences(max_num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens are in groups, but each sequence has a row of its own in the block tables."""
    config = EngineConfig(device="cpu", max_model_len=64, max_num_seqs=max_num_seqs, enforce_eager=True)
    runner, backend = build_runner(tiny_model("qwen3"), config), Mock(scratch_block=0)
    monkeypatch.setattr(graph_capture, "GraphSet", Mock())
    invariant = config.model_copy(update={"batch_invariant": True})
    graph_capture.capture_decode(runner._paged, backend, runner.limits, invariant, lambda *_: None, [])
    assert backend.set_up_graphs.call_args.args[:2] == (64, max(max_num_seqs, INVARIANT_ROWS))
