"""Steps as CUDA graphs of (tokens, sequences), captured over the model's layers; steps of fewer are padded.

Launching a step's kernels one by one takes the host longer than the device needs for up to some hundred tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from nf4_kernels.cuda.device_clock import DeviceClock
from server.checkpoint.base import Progress
from server.engine.runtime.attention.calls import attending
from server.engine.runtime.attention.graph_backend import GraphBackend
from server.engine.runtime.batch import Batch, Spans, to_device
from server.engine.runtime.graphs.cuts import cut_layers
from server.engine.runtime.graphs.invariant import in_groups
from server.engine.runtime.graphs.pool import CapturedStep, GraphPool, unowned
from server.engine.runtime.model.lora import adding_masked, others_of
from server.engine.runtime.sampling.ops import largest_of_rows
from server.engine.runtime.sampling.sampler import ModelOutput
from server.engine.runtime.states.pool import StatePool

_WARM_UPS = 1
DRAFT_SIZES = (2, 4, 8, 16, 32, 64)
"""Tokens of steps with draft tokens. GEMMs cost the same for one token as for eight, and little more for 16."""
_CHUNK_SIZES = (32, 64, 128, 192, 256, 384, 512)
# Beyond these sizes the device takes as long as the host takes to launch the kernels. A prompt of a hybrid ends with a step
# of up to 20 tokens.
_LONG_CHUNK_SIZES = (384, 512, 640, 768, 1024)
# The same of steps with a chunk that layers with states compute by other kernels, which the host launches for longer.
_MIXTURE_SIZES = (1536, 2048, 3072, 4096)
# More of these, of mixtures of experts, which compute a token by few of their weights.
_FEW_SEQUENCES = 8
# Sequences of such a step: the states of all of them are copied, those of padding, too.
_MORE_SEQUENCES, _MORE_SEQUENCES_SIZES = 32, (512, 1024, 2048)
# Sequences of more graphs of such steps, and their tokens: prompts come while others decode.


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, multiples of 8 to 64, of 16 to 256, of 64 to 384, 416, 480, of 128 from 512.

    max_num_seqs is the last one. 1024 sequences get 32 sizes. 448 is none: on Hopper cuBLAS takes 1.7 times as long for 448
    tokens times a weight of 28672 x 4096 as for 512.
    """
    few = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16)]
    sizes = [*few, 256, 320, 384, 416, 480, *range(512, max_num_seqs, 128)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def chunk_sizes(max_tokens: int) -> list[int]:
    """Tokens of the graphs that steps with chunks of up to max_tokens tokens need."""
    return _needed(_CHUNK_SIZES, max_tokens)


def _needed(sizes: Sequence[int], max_tokens: int) -> list[int]:
    return [size for size, smaller in zip(sizes, (0, *sizes), strict=False) if smaller < max_tokens]


class Form(NamedTuple):
    """The form of a graph."""

    size: int
    """Tokens; steps of fewer are padded."""
    is_long: bool = False
    """Whether layers with states compute the step by the kernels of long chunks; see StatePool.is_long()."""
    sequences: int = 0
    """The most sequences of chunks; 0: as many as tokens."""


def long_chunk_forms(max_tokens: int, max_num_seqs: int, is_mixture: bool) -> list[Form]:
    """Forms of steps of up to max_tokens tokens with a chunk that layers with states compute by other kernels."""
    sizes = _needed(_LONG_CHUNK_SIZES + (_MIXTURE_SIZES if is_mixture else ()), max_tokens)
    forms = [Form(size, True, min(_FEW_SEQUENCES, max_num_seqs)) for size in sizes]
    more = min(_MORE_SEQUENCES, max_num_seqs)
    if more > _FEW_SEQUENCES:
        forms += [Form(size, True, more) for size in sizes if size in _MORE_SEQUENCES_SIZES]
    return forms


class Tokens(Enum):
    """Kinds of tokens that a graph has."""

    NEWEST = "decode"
    """One of each sequence: as many sequences as tokens."""
    DRAFTED = "steps with draft tokens"
    """Each laid out as a sequence of its own; it also attends to those of its sequence before it in the step."""
    CHUNKS = "steps with prompts"
    """Chunks of up to max_num_seqs sequences; logits of that many rows are computed, of up to 64 tokens those of all."""


@dataclass(frozen=True)
class _Graph:
    """A captured step and the tensors that it reads and writes."""

    step: CapturedStep
    inputs: torch.Tensor
    """int64 [3, tokens]: token ids, positions, cache slots."""
    output: ModelOutput
    sampled_rows: torch.Tensor | None = None
    """int64 [sequences]: the rows whose logits are computed; None: all."""
    others: torch.Tensor | None = None
    """bool [tokens, slots]: which adapters are not each row's, in graphs that add adapters."""


class GraphSet:
    """Replays steps of one kind of tokens; what a replay finds is valid until the next one of the pool."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: GraphBackend,
        block_size: int,
        clock: DeviceClock | None,
        tokens: Tokens = Tokens.NEWEST,
        *,
        pool: GraphPool | None = None,
        max_num_seqs: int = 0,
        adapter_slots: int = 0,
        waited_for: bool = False,
        states: StatePool | None = None,
    ) -> None:
        """pool: the pool of other graphs, which these share. max_num_seqs: sequences of a step with chunks.

        waited_for: whether the device is idle before a step. states: of the layers that have states.
        """
        self._model = model
        self._backend = backend
        self._block_size = block_size
        self._clock = clock
        self.tokens = tokens
        self._max_num_seqs = max_num_seqs
        self._adapter_slots = adapter_slots
        self._waited_for = waited_for
        self._states = states
        self._graphs: dict[Form, _Graph] = {}
        # Steps in which a sequence has an adapter have graphs of their own, so that the others pay nothing for adapters.
        self._adapted: dict[Form, _Graph] = {}
        self._largest = 0
        self.pool = GraphPool(model.device, backend.scratch_block * block_size) if pool is None else pool
        """Captures and replays these graphs; other graphs may share it."""
        self._last: _Graph | None = None

    def capture(self, sizes: Iterable[int], progress: Progress, long_forms: Iterable[Form] = ()) -> None:
        """Capture for each number of tokens, the largest first because the others share its memory.

        long_forms: of the steps with long chunks of layers with states.
        """
        forms = [*map(Form, sizes), *long_forms]
        for done, form in enumerate(sorted(forms, reverse=True)):
            progress(f"capturing {self.tokens.value}: {form.size}", done / len(forms))
            self._graphs[form] = self._capture_one(form, None)
            if self._adapter_slots:
                others = torch.ones(form.size, self._adapter_slots, dtype=torch.bool, device=self._model.device)
                self._adapted[form] = self._capture_one(form, others)
        self._largest = max(form.size for form in forms)
        progress(f"capturing {self.tokens.value}", 1.0)

    @property
    def sizes(self) -> list[int]:
        """The numbers of tokens that have a graph."""
        return sorted({form.size for form in self._graphs})

    def fits(self, batch: Batch) -> bool:
        """Whether a graph is large enough for batch, and computes all that is asked for."""
        count, wanted = batch.num_tokens, batch.sampled_rows
        if count > self._largest:
            return False
        match self.tokens:
            case Tokens.NEWEST:
                return batch.num_single == len(batch.spans) == wanted.shape[0]
            case Tokens.DRAFTED:
                return torch.equal(wanted, torch.arange(count))
            case Tokens.CHUNKS:
                form = self._form(batch)
                return form is not None and not batch.spans.adapted and wanted.shape[0] <= self._rows(form)

    def run(self, batch: Batch, newest: torch.Tensor | None = None, source: list[int] | None = None) -> ModelOutput:
        """Replay the step that fits batch; newest and source: see GraphPool.fill()."""
        if self.tokens is Tokens.DRAFTED and batch.num_single < batch.num_tokens:
            _, batch = next(in_groups(batch, self._block_size, self._largest))
        graph = self._last = self._filled(batch, newest, source)
        self.pool.replay(graph.step)
        return _first(graph, batch.num_tokens if graph.sampled_rows is None else batch.sampled_rows.shape[0])

    def run_next(self, newest: torch.Tensor) -> ModelOutput | None:
        """Replay the step behind the last one of these graphs, without another step between.

        newest: int64, the tokens of the last step's first sequences, which go on. None, with nothing launched, where run()
        has to do it.
        """
        last = self._last
        if last is None or not self._backend.advance_decode_graph(last.inputs, newest):
            return None
        self.pool.replay(last.step)
        return _first(last, len(newest))

    def _form(self, batch: Batch) -> Form | None:
        """The form of the smallest graph that has room for batch's tokens, and for its sequences if these are chunks."""
        chunks = self.tokens is Tokens.CHUNKS
        is_long = chunks and self._states is not None and self._states.is_long(batch.spans)
        fitting = (
            form
            for form in self._graphs
            if form.is_long == is_long
            and form.size >= batch.num_tokens
            and (not chunks or self._sequences(form) >= len(batch.spans))
        )
        return min(fitting, default=None)

    def _sequences(self, form: Form) -> int:
        if self.tokens is not Tokens.CHUNKS:
            return form.size
        return min(form.size, self._max_num_seqs, form.sequences or form.size)

    def _rows(self, form: Form) -> int:
        """How many logits a graph of chunks computes: of few tokens all, which may be draft tokens."""
        return form.size if form.size <= DRAFT_SIZES[-1] else self._sequences(form)

    def _filled(self, batch: Batch, newest: torch.Tensor | None, source: list[int] | None) -> _Graph:
        """The graph that fits batch, which is laid out for it."""
        count, form = batch.num_tokens, self._form(batch)
        assert form is not None
        graph = (self._adapted if batch.spans.adapted else self._graphs)[form]
        if graph.others is not None:
            graph.others[:count].copy_(others_of(batch, self._adapter_slots), non_blocking=True)
            graph.others[count:] = True
        if graph.sampled_rows is not None:
            rows = to_device(batch.sampled_rows.numpy(), graph.sampled_rows.device)
            graph.sampled_rows[: len(rows)].copy_(rows)
        plan = partial(self._plan, batch.spans, form)
        self.pool.fill(graph.inputs, plan, (batch.ids, batch.positions, batch.slots), newest, source)
        return graph

    def _plan(self, spans: Spans, form: Form) -> Any:
        """Lay out a step and its states; the backend's plan of chunks."""
        self._plan_states(spans, form)
        if self.tokens is Tokens.CHUNKS:
            return self._backend.plan_mixed_graph(spans, form.size, self._sequences(form))
        self._backend.plan_decode_graph(spans, form.size, self.tokens is Tokens.DRAFTED)
        return None

    def _plan_states(self, spans: Spans, form: Form) -> None:
        if self._states is None:
            return
        if self.tokens is Tokens.CHUNKS:
            self._states.plan_chunks_graph(spans, form.size, self._sequences(form))
        else:
            self._states.plan_decode_graph(spans, form.size)

    def _begin(self, slots: torch.Tensor, form: Form, plan: Any) -> None:
        if self.tokens is Tokens.CHUNKS:
            self._backend.begin_mixed_graph(slots, plan)
            if self._states is not None:
                self._states.begin_chunks_graph(form.size, self._sequences(form), form.is_long)
            return
        self._backend.begin_decode_graph(slots, self.tokens is Tokens.DRAFTED)
        if self._states is not None:
            self._states.begin_decode_graph(form.size)

    def _capture_one(self, form: Form, others: torch.Tensor | None) -> _Graph:
        inputs, rows, kept = self.pool.new_inputs(form.size), None, {}
        if self.tokens is Tokens.CHUNKS:
            rows = torch.zeros(self._rows(form), dtype=torch.int64, device=self._model.device)
            kept = {"logits_to_keep": rows}
        # All of it is padding: no sequence may have as many tokens as the largest graph.
        plan = self._plan(Spans.of([]), form)

        def forward() -> tuple[torch.Tensor, ...]:
            self._begin(inputs[2], form, plan)
            with attending(self._backend), adding_masked(others):
                output: Any = self._model(input_ids=inputs[:1], position_ids=inputs[1:2], use_cache=False, **kept)
            if self._clock is not None:
                self._clock.collect()
            logits: torch.Tensor = output.logits[0]
            return (logits,) if rows is not None else (logits, *largest_of_rows(logits))

        with cut_layers(self._model, self.pool.cut if self._waited_for else None):
            captured, found = self.pool.capture(forward, _WARM_UPS)
        logits, *greedy = map(unowned, found)
        best = (greedy[0], greedy[1]) if greedy else None
        return _Graph(captured, inputs, ModelOutput(logits, best, inputs[0]), rows, others)


def _first(graph: _Graph, count: int) -> ModelOutput:
    """Results of a replayed step for its first rows."""
    logits, greedy = graph.output.logits[:count], graph.output.greedy
    if greedy is None:
        return ModelOutput(logits)
    best, tokens = greedy
    return ModelOutput(logits, (best[:count], tokens[:count]), graph.inputs[0, :count])
