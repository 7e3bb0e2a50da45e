"""The size of the KV cache: what a largest step leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from server.config import EngineConfig
from server.engine.runtime import runner as runner_module
from server.engine.runtime.attention.base import AttentionBackend
from server.engine.runtime.attention.factory import create_backend
from server.engine.runtime.attention.probe import probe_layers
from server.engine.runtime.batch import Batch
from server.engine.runtime.limits import EngineConfigError
from server.engine.runtime.memory import share_for_cache
from server.engine.runtime.runner import ModelRunner
from tests.engine.models import tiny_model

GIB = 2**30


def test_the_cache_gets_what_a_step_and_a_reserve_leave() -> None:
    assert share_for_cache(free=80 * GIB, total=100 * GIB, step=7 * GIB) == 70 * GIB
    assert share_for_cache(free=5 * GIB, total=100 * GIB, step=7 * GIB) == 0


@pytest.mark.parametrize(("tokens", "seqs", "blocks"), [(100, 8, 25), (300, 8, 75), (512, 4, 128), (16, 20, 5)])
def test_the_largest_step_is_what_the_scheduler_may_make_at_most(
    tokens: int, seqs: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(device="cpu", block_size=4, max_num_batched_tokens=tokens, max_num_seqs=seqs)
    model = tiny_model("llama")
    runner = ModelRunner(model, config)
    shapes, options = probe_layers(model)
    seen: list[Batch] = []
    run = runner._run

    def watched(batch: Batch) -> torch.Tensor:
        seen.append(batch)
        logits = run(batch)
        assert logits.isfinite().all()
        return logits

    def make_backend(num_blocks: int) -> AttentionBackend:
        return create_backend(shapes, options, num_blocks, 4, torch.float32, torch.device("cpu"))

    monkeypatch.setattr(runner, "_run", watched)
    assert runner._largest_step(make_backend, config) == blocks
    (batch,) = seen
    assert batch.num_tokens == max(tokens, seqs)
    assert len(batch.sampled_rows) == seqs
    # The model is made for 256 tokens.
    assert max(span.end for span in batch.spans) <= 256
    assert len(set(batch.slots.tolist())) == batch.num_tokens
    assert set((batch.slots // 4).tolist()) == {block for span in batch.spans for block in span.blocks}


def test_too_little_memory_for_a_step_is_the_configurations_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Callable[[], int], device: torch.device) -> int:
        raise torch.OutOfMemoryError("no memory")

    class OnCuda(ModelRunner):
        """Takes the model's device for a GPU."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, torch.device("cuda", 0) if name == "_device" else value)

    monkeypatch.setattr(runner_module, "cache_bytes", full)
    with pytest.raises(EngineConfigError, match=r"step of 4096 tokens; engine\.max_num_batched_tokens"):
        OnCuda(tiny_model("llama"), EngineConfig())
