"""Mixed steps, those with chunks of prompts, as CUDA graphs: one per number of tokens.

Launching such a step's kernels one by one takes the host longer than the device needs for some hundred tokens, and every
running request waits meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from nf4_kernels.cuda.device_clock import DeviceClock
from server.checkpoint.base import Progress
from server.engine.runtime.attention.calls import attending
from server.engine.runtime.attention.graph_backend import GraphBackend
from server.engine.runtime.batch import Batch, Span, Spans, to_device
from server.engine.runtime.graphs.decode import WARM_UPS
from server.engine.runtime.graphs.pool import CapturedStep, GraphPool, unowned
from server.engine.runtime.model.lora import adding_masked

SIZES = (64, 128, 192, 256, 384, 512)
"""Tokens of a step. Beyond these sizes the device takes as long as the host takes to launch its kernels."""


@dataclass(frozen=True)
class _Graph:
    """A captured step and the tensors that it reads and writes."""

    step: CapturedStep
    inputs: torch.Tensor
    """int64 [3, size]: token ids, positions, cache slots."""
    wanted: torch.Tensor
    """int64 [sequences]: the rows whose logits are computed."""
    logits: torch.Tensor


class MixedGraphs:
    """Replays steps of up to the largest size; fewer tokens and sequences are padded."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: GraphBackend,
        block_size: int,
        max_num_seqs: int,
        clock: DeviceClock | None,
        pool: GraphPool,
    ) -> None:
        self._model = model
        self._backend = backend
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._pool = pool
        self._graphs: dict[int, _Graph] = {}

    def capture(self, largest: int, progress: Progress) -> None:
        """Capture the sizes that steps of up to largest tokens need."""
        sizes = [size for size, smaller in zip(SIZES, (0, *SIZES), strict=False) if smaller < largest]
        for done, size in enumerate(reversed(sizes)):
            progress(f"capturing steps of {size} tokens", done / len(sizes))
            self._graphs[size] = self._capture_one(size)
        progress("capturing steps", 1.0)

    def fits(self, batch: Batch) -> bool:
        """Whether a graph is large enough for batch, and computes all that is asked for."""
        size = self._size(batch)
        if size is None:
            return False
        sequences = self._sequences(size)
        return len(batch.spans) <= sequences and batch.sampled_rows.shape[0] <= sequences and not batch.spans.adapted

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [batch.sampled_rows, vocabulary] of a batch that fits(), valid until the next run."""
        size = self._size(batch)
        assert size is not None
        captured, wanted = self._graphs[size], batch.sampled_rows.shape[0]
        captured.wanted[:wanted].copy_(to_device(batch.sampled_rows.numpy(), captured.wanted.device))

        def plan() -> None:
            self._backend.plan_mixed_graph(batch.spans, size, self._sequences(size))

        self._pool.fill(captured.inputs, plan, (batch.ids, batch.positions, batch.slots))
        self._pool.replay(captured.step)
        return captured.logits[:wanted]

    def _size(self, batch: Batch) -> int | None:
        return min((size for size in self._graphs if size >= batch.num_tokens), default=None)

    def _sequences(self, size: int) -> int:
        return min(size, self._max_num_seqs)

    def _capture_one(self, size: int) -> _Graph:
        inputs = self._pool.new_inputs(size)
        wanted = torch.zeros(self._sequences(size), dtype=torch.int64, device=self._model.device)
        scratch = (self._backend.scratch_block,) * -(-size // self._block_size)
        plan = self._backend.plan_mixed_graph(Spans.of([Span(0, 0, size, scratch)]), size, len(wanted))

        def forward() -> torch.Tensor:
            self._backend.begin_mixed_graph(inputs[2], plan)
            with attending(self._backend), adding_masked(None):
                output: Any = self._model(
                    input_ids=inputs[:1], position_ids=inputs[1:2], use_cache=False, logits_to_keep=wanted
                )
            if self._clock is not None:
                self._clock.collect()
            logits: torch.Tensor = output.logits[0]
            return logits

        captured, logits = self._pool.capture(forward, WARM_UPS)
        return _Graph(captured, inputs, wanted, unowned(logits))
