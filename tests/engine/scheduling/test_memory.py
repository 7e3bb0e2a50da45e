"""The size of the KV cache: what a largest step leaves."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server.config import EngineConfig
from server.engine.runtime.batch import Batch
from server.engine.runtime.memory import SCREEN_BYTES, drives_screen, reserve, share_for_cache
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.cache import CacheSpec, cache_budget, run_largest_step
from tests.engine.models import tiny_model

GIB = 2**30


def test_the_cache_gets_what_a_step_and_a_reserve_leave() -> None:
    assert share_for_cache(free=80 * GIB, reserved=3 * GIB, step=7 * GIB) == 70 * GIB
    assert share_for_cache(free=5 * GIB, reserved=3 * GIB, step=7 * GIB) == 0


@pytest.mark.parametrize(("screen", "expected"), [(0, 3 * GIB), (1, 3 * GIB + SCREEN_BYTES)])
def test_a_gpu_that_drives_a_screen_keeps_more_free(
    screen: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(found: Any, attribute: int, _: Any) -> int:
        found._obj.value = screen if attribute == 17 else 5
        return 0

    driver = SimpleNamespace(cuDeviceGet=lambda *_: 0, cuDeviceGetAttribute=read)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    drives_screen.cache_clear()
    try:
        assert reserve(torch.device("cuda", 0), 100 * GIB) == expected
    finally:
        drives_screen.cache_clear()


@pytest.mark.parametrize(("tokens", "seqs", "blocks"), [(100, 8, 25), (300, 8, 75), (512, 4, 128), (16, 20, 5)])
def test_the_largest_step_is_what_the_scheduler_may_make_at_most(tokens: int, seqs: int, blocks: int) -> None:
    config = EngineConfig(device="cpu", block_size=4, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    model = tiny_model("llama")
    spec = CacheSpec.of(model, config)
    seen: list[Batch] = []

    class Watched(PagedModel):
        def run(self, batch: Batch) -> torch.Tensor:
            seen.append(batch)
            logits = super().run(batch)
            assert logits.isfinite().all()
            return logits

    assert run_largest_step(model, lambda count: Watched(model, spec.backend(count), 4), config) == blocks
    (batch,) = seen
    assert batch.num_tokens == max(tokens, seqs)
    assert len(batch.sampled_rows) == seqs
    # The model is made for 256 tokens.
    assert max(span.end for span in batch.spans) <= 256
    assert len(set(batch.slots.tolist())) == batch.num_tokens
    assert set((batch.slots // 4).tolist()) == {block for span in batch.spans for block in span.blocks}


def test_a_cache_of_a_configured_size_runs_no_step() -> None:
    model, config = tiny_model("llama"), EngineConfig(device="cpu", kv_cache_bytes=2**21)
    assert cache_budget(model, lambda _: pytest.fail("no cache is made"), 1, config) == 2**21
