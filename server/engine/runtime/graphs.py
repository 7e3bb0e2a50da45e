"""Decode steps as CUDA graphs: one per batch size of a ladder, captured over layers that torch.compile has fused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from server.checkpoint.base import Progress
from server.engine.runtime.attention.base import attending
from server.engine.runtime.attention.flashinfer import FlashInferBackend
from server.engine.runtime.batch import Batch

logger = logging.getLogger(__name__)

WARM_UPS = 2


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, multiples of 8 to 64, of 16 to 128, of 32 beyond; max_num_seqs last."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_num_seqs + 32, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


@dataclass(frozen=True)
class _Graph:
    """A captured step and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    """int64 [3, size]: token ids, positions, cache slots."""
    logits: torch.Tensor


class DecodeGraphs:
    """Replays decode steps of up to the ladder's largest size; smaller batches are padded with a scratch sequence."""

    def __init__(self, model: PreTrainedModel, backend: FlashInferBackend, block_size: int) -> None:
        self._model = model
        self._backend = backend
        self._scratch_slot = backend.scratch_block * block_size
        self._graphs: dict[int, _Graph] = {}
        self._largest = 0

    def capture(self, sizes: list[int], progress: Progress) -> None:
        """Compile and capture for each of sizes. The largest comes first: the others share its memory."""
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(sorted(sizes, reverse=True)):
            progress(f"capturing decode of {size}", done / len(sizes))
            self._graphs[size] = self._capture_one(size, pool)
        self._largest = max(sizes)
        progress("capturing decode", 1.0)

    def fits(self, batch: Batch) -> bool:
        """Whether every sequence of batch is one token whose logits are wanted, and a graph is large enough."""
        return batch.num_single == len(batch.spans) == batch.sampled_rows.shape[0] <= self._largest

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [sequences, vocabulary], valid until the next run."""
        count = len(batch.spans)
        size = min(s for s in self._graphs if s >= count)
        captured = self._graphs[size]
        self._backend.plan_graph(list(batch.spans), size)
        for row, values in zip(captured.inputs, (batch.ids, batch.positions, batch.slots), strict=True):
            row[:count].copy_(values)
        captured.inputs[2, count:] = self._scratch_slot
        captured.graph.replay()
        return captured.logits[:count]

    def _capture_one(self, size: int, pool: Any) -> _Graph:
        inputs = torch.zeros(3, size, dtype=torch.int64, device=self._model.device)
        inputs[2] = self._scratch_slot
        self._backend.plan_graph([], size)

        def forward() -> torch.Tensor:
            self._backend.begin_graph(inputs[2])
            with attending(self._backend):
                logits: torch.Tensor = self._model(
                    input_ids=inputs[:1], position_ids=inputs[1:2], use_cache=False
                ).logits[0]
            return logits

        with _compiled_layers(self._model):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    forward()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = forward()
        return _Graph(graph, inputs, logits)


@contextmanager
def _compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Run the decoder layers through torch.compile while entered; all layers of one kind share one compilation."""
    layers = list(model.get_decoder().layers)
    plain: list[Callable[..., object]] = [layer.forward for layer in layers]
    for layer, forward in zip(layers, plain, strict=True):
        layer.forward = torch.compile(forward, fullgraph=True, dynamic=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
