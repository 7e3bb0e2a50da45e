"""Decode steps as CUDA graphs: one per batch size of a ladder, captured over layers that torch.compile has fused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from nf4_kernels.device_clock import DeviceClock
from server.checkpoint.base import Progress
from server.engine.runtime.attention.base import attending
from server.engine.runtime.attention.flashinfer import FlashInferBackend
from server.engine.runtime.batch import Batch
from server.engine.runtime.compile.block_sizes import small_kernels_by_rule
from server.engine.runtime.compile.passes.norms import fused_operations
from server.engine.runtime.compile.pdl import overlapping_launches
from server.engine.runtime.model.lora import adding_masked, others_of
from server.engine.runtime.sampling.inverse_cdf import draw
from server.engine.runtime.sampling.sample import Sampled
from server.engine.scheduling.scheduler import Step
from server.engine.scheduling.sequence import UNKNOWN

logger = logging.getLogger(__name__)

WARM_UPS = 2
# From so many sequences on attention normalises and rotates queries and keys: with fewer its start, which is hidden
# behind a kernel that does, takes longer than that kernel (docs/adr/0011-decode-attention.md).
_ROTATED = 8
_Results = TypeVar("_Results")


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
    greedy: torch.Tensor
    """float32 [2, size]: the best logit of each row, and which token has it (exact: vocabularies are below 2**24)."""
    others: torch.Tensor | None
    """bool [size, slots]: which adapters are not each row's, in graphs that add adapters."""


@dataclass(frozen=True)
class Launched:
    """A decode step on the device whose tokens have not been read."""

    step: Step
    tokens: torch.Tensor
    """int64, on the device: the token of each of step.sampled."""
    copied: torch.Tensor
    """float32 [2, sequences] in host memory, once done has happened: the best logits, and the tokens."""
    times: tuple[DeviceClock, torch.Tensor] | None
    """The device's clock, and its totals once done has happened."""
    done: torch.cuda.Event

    def read(self) -> list[Sampled]:
        """Wait for the tokens."""
        self.done.synchronize()
        if self.times is not None:
            clock, totals = self.times
            clock.note(totals)
        best, tokens = self.copied.tolist()
        return [
            Sampled(int(token)) if math.isfinite(value) else Sampled(0, error="the model's logits are not numbers")
            for value, token in zip(best, tokens, strict=True)
        ]


class DecodeGraphs:
    """Replays decode steps of up to the ladder's largest size; smaller batches are padded with a scratch sequence."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: FlashInferBackend,
        block_size: int,
        clock: DeviceClock | None,
        adapter_slots: int = 0,
    ) -> None:
        self._model = model
        self._backend = backend
        self._graphs: dict[int, _Graph] = {}
        self._clock = clock
        self._adapter_slots = adapter_slots
        # Steps in which a sequence has an adapter have graphs of their own: the others pay nothing for them.
        self._adapted: dict[int, _Graph] = {}
        self._largest = 0
        self.pool = Pool(model.device, backend.scratch_block * block_size)
        """What captures and replays these graphs, and may others."""

    def capture(self, sizes: list[int], progress: Progress) -> None:
        """Compile and capture for each of sizes. The largest comes first: the others share its memory."""
        for done, size in enumerate(sorted(sizes, reverse=True)):
            progress(f"capturing decode of {size}", done / len(sizes))
            self._graphs[size] = self._capture_one(size, None)
            if self._adapter_slots:
                others = torch.ones(size, self._adapter_slots, dtype=torch.bool, device=self._model.device)
                self._adapted[size] = self._capture_one(size, others)
        self._largest = max(sizes)
        progress("capturing decode", 1.0)

    def fits(self, batch: Batch) -> bool:
        """Whether every sequence of batch is one token whose logits are wanted, and a graph is large enough."""
        return batch.num_single == len(batch.spans) == batch.sampled_rows.shape[0] <= self._largest

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits [sequences, vocabulary], valid until the next run."""
        return self._replay(batch, batch.ids).logits[: len(batch.spans)]

    def launch(self, step: Step, batch: Batch, previous: Launched | None) -> Launched:
        """Start a decode step; ids that are UNKNOWN come from the step before it, on the device."""
        ids = batch.ids
        if previous is not None:
            rows = {id(chunk.sequence): row for row, chunk in enumerate(previous.step.sampled)}
            source = torch.tensor([rows.get(id(chunk.sequence), 0) for chunk in step.chunks], pin_memory=True)
            ids = torch.where(ids == UNKNOWN, previous.tokens[source.to(ids.device, non_blocking=True)], ids)
        captured = self._replay(batch, ids)
        count = len(batch.spans)
        best, tokens = captured.greedy[:, :count]
        tokens = draw(captured.logits[:count], [chunk.sequence for chunk in step.chunks], tokens.long())
        copied = torch.empty(2, count, dtype=torch.float32, pin_memory=True)
        copied.copy_(torch.stack((best, tokens.float())), non_blocking=True)
        times = None
        if self._clock is not None:
            times = self._clock, torch.empty_like(self._clock.totals, device="cpu", pin_memory=True)
            times[1].copy_(self._clock.totals, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Launched(step, tokens, copied, times, done)

    def _replay(self, batch: Batch, ids: torch.Tensor) -> _Graph:
        count = len(batch.spans)
        size = min(s for s in self._graphs if s >= count)
        adapted = any(span.adapter is not None for span in batch.spans)
        captured = (self._adapted if adapted else self._graphs)[size]
        if captured.others is not None:
            captured.others[:count].copy_(others_of(batch, self._adapter_slots), non_blocking=True)
            captured.others[count:] = True
        plan = partial(self._backend.plan_graph, list(batch.spans), size)
        self.pool.replay(captured.graph, plan, captured.inputs, (ids, batch.positions, batch.slots))
        return captured

    def _capture_one(self, size: int, others: torch.Tensor | None) -> _Graph:
        inputs = self.pool.new_inputs(size)
        self._backend.plan_graph([], size)

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            self._backend.begin_graph(inputs[2])
            with attending(self._backend), adding_masked(others):
                logits: torch.Tensor = self._model(
                    input_ids=inputs[:1], position_ids=inputs[1:2], use_cache=False
                ).logits[0]
            if self._clock is not None:
                self._clock.collect()
            best, tokens = logits.float().max(dim=-1)
            return logits, torch.stack((best, tokens.float()))

        with _compiled_layers(self._model, self._backend.rotates and size >= _ROTATED):
            graph, (logits, greedy) = self.pool.capture(forward, WARM_UPS)
        return _Graph(graph, inputs, unowned(logits), unowned(greedy), others)


class Pool:
    """Captures graphs that share their memory: the results of a replay are there until the next one of any of them.

    A graph's inputs are int64 [3, size]: token ids, positions, cache slots. What a step leaves of them is padding, whose
    keys and values go to scratch_slot.
    """

    def __init__(self, device: torch.device, scratch_slot: int) -> None:
        self._device = device
        self._scratch_slot = scratch_slot
        self._planned = torch.cuda.Event()
        self.replays = 0
        """Graphs started so far."""
        # One for all captures: cuBLAS keeps 32 MiB for each stream it has seen.
        self._stream = torch.cuda.Stream(device)
        self._handle = torch.cuda.graph_pool_handle()

    def new_inputs(self, size: int) -> torch.Tensor:
        """The inputs of a graph, all padding."""
        inputs = torch.zeros(3, size, dtype=torch.int64, device=self._device)
        inputs[2] = self._scratch_slot
        return inputs

    def replay(
        self,
        graph: torch.cuda.CUDAGraph,
        plan: Callable[[], object],
        inputs: torch.Tensor,
        values: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Start a graph on values, ids, positions and slots of as many tokens; plan() lays out its attention."""
        # The plan's host memory may be written again only when its copies to the device are over.
        self._planned.synchronize()
        plan()
        count = len(values[0])
        for row, own in zip(inputs, values, strict=True):
            row[:count].copy_(own)
        inputs[2, count:] = self._scratch_slot
        self._planned.record()
        graph.replay()
        self.replays += 1

    def capture(self, forward: Callable[[], _Results], warm_ups: int) -> tuple[torch.cuda.CUDAGraph, _Results]:
        """A graph of forward(), which runs so often before; see unowned() for its results."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(warm_ups):
                forward()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._handle, stream=self._stream):
            results = forward()
        return graph, results


class _Memory:
    """A contiguous tensor's bytes, without the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.itemsize
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same contiguous tensor in the same memory, which may be given to others when the original is gone.

    For a graph's results: only the latest replay's are read, so the next capture may use their memory, which the graphs'
    pool keeps.
    """
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


@contextmanager
def _compiled_layers(model: PreTrainedModel, rotates: bool) -> Iterator[None]:
    """Run the decoder layers through torch.compile while entered; all layers of one kind share one compilation.

    rotates: whether the attention does norms and rotations of queries and keys.
    """
    # One compilation for each size of the ladder and kind of layer, all of them wanted.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 1024)
    layers = list(model.get_decoder().layers)
    plain: list[Callable[..., object]] = [layer.forward for layer in layers]
    for layer, forward in zip(layers, plain, strict=True):
        layer.forward = torch.compile(forward, fullgraph=True, dynamic=False)
    try:
        with overlapping_launches(), small_kernels_by_rule(), fused_operations(rotates):
            yield
    finally:
        for layer in layers:
            del layer.forward
