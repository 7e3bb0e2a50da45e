"""Steps with prompts' chunks as CUDA graphs: one per number of tokens, captured over the model's compiled layers.

Launching such a step's kernels one by one takes the host longer than the device needs for some hundred tokens, and every
running request waits meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from nf4_kernels.device_clock import DeviceClock
from server.checkpoint.base import Progress
from server.engine.runtime.attention.base import attending
from server.engine.runtime.attention.flashinfer import FlashInferBackend
from server.engine.runtime.attention.flashinfer_graphs import LONGEST
from server.engine.runtime.batch import Batch, Span
from server.engine.runtime.graphs.decode import WARM_UPS, Pool, unowned
from server.engine.runtime.limits import ModelLimits
from server.engine.runtime.model.lora import adding_masked

SIZES = (64, 128, 192, 256, 384, 512)
"""Tokens of a step. Beyond them the device takes as long as the launches."""


@dataclass(frozen=True)
class _Graph:
    """A captured step and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
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
        backend: FlashInferBackend,
        block_size: int,
        max_num_seqs: int,
        clock: DeviceClock | None,
        pool: Pool,
    ) -> None:
        self._model = model
        self._backend = backend
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._pool = pool
        self._graphs: dict[int, _Graph] = {}

    def capture(self, largest: int, progress: Progress) -> None:
        """Capture as many sizes as steps of up to so many tokens need."""
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
        return (
            len(batch.spans) <= sequences
            and batch.sampled_rows.shape[0] <= sequences
            and all(span.end <= LONGEST and span.adapter is None for span in batch.spans)
        )

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [batch.sampled_rows, vocabulary] of a batch that fits(), valid until the next run."""
        size = self._size(batch)
        assert size is not None
        captured, wanted = self._graphs[size], batch.sampled_rows.shape[0]
        captured.wanted[:wanted].copy_(batch.sampled_rows)
        plan = partial(self._backend.plan_mixed_graph, list(batch.spans), size, self._sequences(size))
        self._pool.replay(captured.graph, plan, captured.inputs, (batch.ids, batch.positions, batch.slots))
        return captured.logits[:wanted]

    def _size(self, batch: Batch) -> int | None:
        return min((size for size in self._graphs if size >= batch.num_tokens), default=None)

    def _sequences(self, size: int) -> int:
        return min(size, self._max_num_seqs)

    def _capture_one(self, size: int) -> _Graph:
        inputs = self._pool.new_inputs(size)
        wanted = torch.zeros(self._sequences(size), dtype=torch.int64, device=self._model.device)
        scratch = (self._backend.scratch_block,) * -(-size // self._block_size)
        wrappers = self._backend.plan_mixed_graph([Span(0, 0, size, scratch)], size, len(wanted))

        def forward() -> torch.Tensor:
            self._backend.begin_graph(inputs[2], wrappers)
            with attending(self._backend), adding_masked(None):
                output: Any = self._model(
                    input_ids=inputs[:1], position_ids=inputs[1:2], use_cache=False, logits_to_keep=wanted
                )
            if self._clock is not None:
                self._clock.collect()
            logits: torch.Tensor = output.logits[0]
            return logits

        graph, logits = self._pool.capture(forward, WARM_UPS)
        return _Graph(graph, inputs, wanted, unowned(logits))


def trial_steps(first_chunk: Callable[[int], Batch], block_size: int, limits: ModelLimits) -> Iterator[Batch]:
    """Steps to try graphs on, to be run in turn: first chunks, then a decoding sequence beside a chunk of another one.

    first_chunk(n): a step of a sequence's first n tokens, in the cache's first blocks.
    """
    for count in (7, block_size + 1):
        batch = first_chunk(count)
        yield replace(batch, sampled_rows=batch.sampled_rows[-1:])
    count = block_size // 2
    if not count or limits.num_blocks < 3 or limits.max_model_len < 2 * block_size:
        return
    # The sequence of the last chunk goes on; the other one shares its first block and has its own tokens in a third.
    positions = torch.arange(block_size, block_size + 1 + count, device=batch.ids.device)
    positions[0] += 1
    positions[1:] -= 1
    slots = torch.cat((positions[:1], positions[1:] + block_size))
    spans = Span(0, block_size + 1, 1, (0, 1)), Span(1, block_size, count, (0, 2))
    ids = (positions + 211) % limits.vocab_size
    yield Batch(ids, positions, slots, positions.new_tensor([0, count]), spans, 1)
