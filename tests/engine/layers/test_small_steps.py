"""Steps of few tokens in one C call against the same steps layer by layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from server.checkpoint.loading import load_model
from server.config import EngineConfig
from server.engine.runtime import pointwise
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.layers.small_steps import MAX_TOKENS, SmallSteps
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from tests.checkpoint.families import COMMON, SERVED
from tests.engine.models import tiny_model

BLOCK, BLOCKS = 4, 40
CONFIG = EngineConfig(block_size=BLOCK, kv_cache_bytes=2**20, max_num_batched_tokens=64, max_num_seqs=8)
UNSUITABLE = ("arcee", "glm", "granite", "hunyuan_v1_dense", "nemotron", "olmo", "olmo2", "phi")
"""Families with written layers that have something for which there is no C function."""


def runner_of(family: str, folder: Path) -> ModelRunner:
    """A model with its layers in NF4."""
    model = tiny_model(family, **{**COMMON, **SERVED[family]}).to(torch.bfloat16)
    model.save_pretrained(folder)
    return build_runner(load_model(folder, torch.device("cpu"), torch.float32, lambda *_: None), CONFIG)


def batch_of(pieces: list[tuple[int, int]], wanted: list[int]) -> Batch:
    """A step in which sequence i, in blocks of its own, computes tokens [start, end) = pieces[i]; single tokens first."""
    spans, slots, positions, row = [], [], [], 0
    for index, (start, end) in enumerate(pieces):
        blocks = range(index * 8, index * 8 + -(-end // BLOCK))
        spans.append(Span(row, start, end - start, blocks))
        positions += range(start, end)
        slots += [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, end)]
        row += end - start
    ids = torch.from_numpy(np.random.default_rng(row).integers(3, 128, row))
    singles = sum(end - start == 1 for start, end in pieces)
    return Batch(ids, torch.tensor(positions), torch.tensor(slots), torch.tensor(wanted), Spans.of(spans), singles)


STEPS = [
    batch_of([(0, 9), (0, 5), (0, 20)], [8, 13, 33]),
    batch_of([(9, 10), (5, 6), (20, 21)], [0, 1, 2]),
    batch_of([(10, 11), (6, 13)], [0, 7]),
    batch_of([(11, 12), (13, 14), (21, 22)], [0, 2]),
    batch_of([(12, 13)], [0]),
    batch_of([(0, 16), (0, 16), (0, 16), (0, 16)], [15, 63]),
]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "smollm3", "mistral", "phi3"])
@torch.inference_mode()
def test_steps_of_all_kinds_give_the_logits_of_the_models_class(family: str, tmp_path: Path) -> None:
    paged = runner_of(family, tmp_path)._paged
    small = paged.small_steps
    assert isinstance(small, SmallSteps)
    for _ in range(2):  # programs are made once and used again
        for batch in STEPS:
            assert batch.num_tokens <= MAX_TOKENS
            assert small.takes(batch)
            found, wanted = small.run(batch), paged.run_class(batch)
            # GEMMs in fixed point may be off by 1e-4 of their results' norm.
            assert (found - wanted).norm() < 1e-3 * wanted.norm()


@torch.inference_mode()
def test_a_program_goes_with_the_number_of_threads(tmp_path: Path) -> None:
    paged = runner_of("llama", tmp_path)._paged
    assert isinstance(paged.small_steps, SmallSteps)
    expected = paged.run(STEPS[0])
    torch.set_num_threads(2)
    try:
        found = paged.run(STEPS[0])
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert sorted(threads for tokens, threads in paged.small_steps._programs if tokens == 34) == [1, 2]


@pytest.mark.parametrize("family", UNSUITABLE)
def test_layers_without_c_functions_run_one_by_one(family: str, tmp_path: Path) -> None:
    assert runner_of(family, tmp_path)._paged.small_steps is None


def test_steps_that_differ_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = pointwise.gate

    def other(gate_up: torch.Tensor, activation: str, out: torch.Tensor) -> pointwise.Call:
        return own(gate_up, "gelu_tanh", out)

    monkeypatch.setattr("server.engine.runtime.layers.small_steps.pointwise.gate", other)
    monkeypatch.setattr("server.engine.runtime.layers.mlp.pointwise.computes", lambda *_: False)
    assert runner_of("llama", tmp_path)._paged.small_steps is None


@torch.inference_mode()
def test_larger_steps_and_adapters_take_the_models_class(tmp_path: Path) -> None:
    paged: PagedModel = runner_of("llama", tmp_path)._paged
    assert paged.small_steps is not None
    assert not paged.small_steps.takes(batch_of([(0, MAX_TOKENS + 1)], [MAX_TOKENS]))
    adapted = batch_of([(0, 2)], [1])
    adapted.spans.adapters = [0]
    assert not paged.small_steps.takes(adapted)
