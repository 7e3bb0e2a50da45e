"""Decode steps as CUDA graphs: one per batch size of a ladder, captured over the model's layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from nf4_kernels.cuda.device_clock import DeviceClock
from server.checkpoint.base import Progress
from server.engine.runtime.attention.calls import attending
from server.engine.runtime.attention.graph_backend import GraphBackend, HostLayout
from server.engine.runtime.batch import Batch, Spans
from server.engine.runtime.graphs.cuts import cut_layers
from server.engine.runtime.graphs.pool import CapturedStep, GraphPool, unowned
from server.engine.runtime.model.lora import adding_masked, others_of
from server.engine.runtime.sampling.ops import largest_of_rows
from server.engine.runtime.sampling.sampler import ModelOutput
from server.engine.runtime.states.pool import StatePool

WARM_UPS = 1


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, multiples of 8 to 64, of 16 to 256, of 64 to 512, of 128 beyond.

    max_num_seqs is the last one. 1024 sequences get 31 sizes.
    """
    few = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16)]
    sizes = [*few, *range(256, 512, 64), *range(512, max_num_seqs, 128)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


@dataclass(frozen=True)
class _Graph:
    """A captured step and the tensors that it reads and writes."""

    step: CapturedStep
    inputs: torch.Tensor
    """int64 [3, size]: token ids, positions, cache slots."""
    logits: torch.Tensor
    best: torch.Tensor
    """float32 [size], of largest_of_rows()."""
    tokens: torch.Tensor
    """int64 [size], likewise."""
    others: torch.Tensor | None
    """bool [size, slots]: which adapters are not each row's, in graphs that add adapters."""


class DecodeGraphs:
    """Replays decode steps of up to the ladder's largest size; smaller batches are padded with a scratch sequence."""

    shared = False
    """Whether a step may have several tokens of one sequence."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: GraphBackend,
        block_size: int,
        clock: DeviceClock | None,
        adapter_slots: int = 0,
        pool: GraphPool | None = None,
        waited_for: bool = False,
        states: StatePool | None = None,
    ) -> None:
        """pool: the pool of other graphs, which these share. waited_for: whether the device is idle before a step.

        states: of the layers that have states.
        """
        self._model = model
        self._backend = backend
        self._graphs: dict[int, _Graph] = {}
        self._clock = clock
        self._adapter_slots = adapter_slots
        self._waited_for = waited_for
        self._states = states
        # Steps in which a sequence has an adapter have graphs of their own, so that the others pay nothing for adapters.
        self._adapted: dict[int, _Graph] = {}
        self._largest = 0
        self.pool = GraphPool(model.device, backend.scratch_block * block_size) if pool is None else pool
        """Captures and replays these graphs; other graphs may share it."""
        self._last: _Graph | None = None

    def capture(self, sizes: list[int], progress: Progress) -> None:
        """Capture for each of sizes, the largest first because the others share its memory."""
        for done, size in enumerate(sorted(sizes, reverse=True)):
            progress(f"capturing decode of {size}", done / len(sizes))
            self._graphs[size] = self._capture_one(size, None)
            if self._adapter_slots:
                others = torch.ones(size, self._adapter_slots, dtype=torch.bool, device=self._model.device)
                self._adapted[size] = self._capture_one(size, others)
        self._largest = max(sizes)
        progress("capturing decode", 1.0)

    @property
    def sizes(self) -> list[int]:
        """The sizes of the graphs that there are, in sequences."""
        return sorted(self._graphs)

    def fits(self, batch: Batch) -> bool:
        """Whether every sequence of batch is one token whose logits are wanted, and a graph is large enough."""
        return batch.num_single == len(batch.spans) == batch.sampled_rows.shape[0] <= self._largest

    def run(self, batch: Batch, newest: torch.Tensor | None = None, source: list[int] | None = None) -> ModelOutput:
        """Replay a decode step; what it finds is valid until the next replay. newest and source: see GraphPool.fill()."""
        return self._output(self._replay(batch, newest, source), len(batch.spans))

    def run_next(self, newest: torch.Tensor) -> ModelOutput | None:
        """Replay the step behind the last one of these graphs, without another step between.

        newest: int64, the tokens of the last step's first sequences, which go on. None, with nothing launched, where run()
        has to do it.
        """
        last = self._last
        if last is None or not self._backend.advance_decode_graph(last.inputs, newest):
            return None
        self.pool.replay(last.step)
        return self._output(last, len(newest))

    def _output(self, captured: _Graph, count: int) -> ModelOutput:
        found = captured.best[:count], captured.tokens[:count]
        return ModelOutput(captured.logits[:count], found, captured.inputs[0, :count])

    def _replay(self, batch: Batch, newest: torch.Tensor | None = None, source: list[int] | None = None) -> _Graph:
        """Replay the graph that fits batch; newest and source: see GraphPool.fill()."""
        captured = self._filled(batch, newest, source)
        self.pool.replay(captured.step)
        return captured

    def _filled(self, batch: Batch, newest: torch.Tensor | None = None, source: list[int] | None = None) -> _Graph:
        """The graph that fits batch, which is laid out for it; newest and source: see GraphPool.fill()."""
        count = len(batch.spans)
        size = min(s for s in self._graphs if s >= count)
        captured = self._last = (self._adapted if batch.spans.adapted else self._graphs)[size]
        if captured.others is not None:
            captured.others[:count].copy_(others_of(batch, self._adapter_slots), non_blocking=True)
            captured.others[count:] = True
        plan = partial(self._plan, batch.spans, size)
        self.pool.fill(captured.inputs, plan, (batch.ids, batch.positions, batch.slots), newest, source)
        return captured

    def _plan(self, spans: Spans, size: int) -> HostLayout | None:
        """Lay out a step, as GraphBackend.host_layout() does, and its states."""
        if self._states is not None:
            self._states.plan_decode_graph(spans, size)
        return self._backend.host_layout(spans, size, self.shared)

    def _capture_one(self, size: int, others: torch.Tensor | None) -> _Graph:
        inputs = self.pool.new_inputs(size)
        # The capture before has waited for the device, and so for the copies of the plan before.
        self._backend.plan_decode_graph(Spans.of([]), size, self.shared)
        if self._states is not None:
            self._states.plan_decode_graph(Spans.of([]), size)

        def forward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            self._backend.begin_decode_graph(inputs[2], self.shared)
            if self._states is not None:
                self._states.begin_decode_graph(size)
            with attending(self._backend), adding_masked(others):
                logits: torch.Tensor = self._model(
                    input_ids=inputs[:1], position_ids=inputs[1:2], use_cache=False
                ).logits[0]
            if self._clock is not None:
                self._clock.collect()
            return logits, *largest_of_rows(logits)

        with cut_layers(self._model, self.pool.cut if self._waited_for else None):
            captured, found = self.pool.capture(forward, WARM_UPS)
        logits, best, tokens = map(unowned, found)
        return _Graph(captured, inputs, logits, best, tokens, others)
