"""Executes steps: a runner takes a step's chunks and gives its sequences' next tokens. The package preparation builds it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

import nf4_kernels
from nf4_kernels.timing import KernelTimes, read_cpu, reader_of
from server.engine.runtime.batch import Batch, batch_of
from server.engine.runtime.graphs.graph_set import GraphSet
from server.engine.runtime.graphs.invariant import run_in_groups
from server.engine.runtime.graphs.launched_step import Launch, LaunchedStep, rows_before
from server.engine.runtime.limits import ModelLimits
from server.engine.runtime.memory import MemoryGauge
from server.engine.runtime.model.expanded import expanded_bytes
from server.engine.runtime.model.image_tower import ImageTower
from server.engine.runtime.model.lora_registry import AdapterRegistry
from server.engine.runtime.model.projections import weight_bytes
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.sampling.ops import sample_by_table
from server.engine.runtime.sampling.prompt_logprobs import score_prompts
from server.engine.runtime.sampling.random_rows import RandomRows
from server.engine.runtime.sampling.sampler import Sampled, Sampler
from server.engine.runtime.sampling.verification import sampled_sequences, verified
from server.engine.runtime.speculation.draft_model import DraftModel
from server.engine.runtime.speculation.launched_drafts import LaunchedDrafts
from server.engine.runtime.states.pool import StatePool
from server.engine.runtime.step_input import StepInput, step_input
from server.engine.runtime.tp_workers import TPWorkers, computed_by_all
from server.engine.scheduling.step import Step
from server.engine.speculation.costs import StepCosts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepGraphs:
    """The CUDA graphs that steps are replayed from, where there are any."""

    decode: GraphSet | None = None
    mixed: GraphSet | None = None
    verify: GraphSet | None = None
    batch_invariant: bool = False
    """Whether every token goes through the one decode graph there is (see graphs/invariant.py)."""


class ModelRunner:
    """A prepared model that executes one step after another. Not thread-safe."""

    def __init__(
        self,
        paged: PagedModel,
        limits: ModelLimits,
        adapters: AdapterRegistry | None = None,
        graphs: StepGraphs | None = None,
        step_costs: StepCosts | None = None,
        workers: TPWorkers | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self._paged = paged
        self._workers = workers
        self._newest: torch.Tensor | None = None
        self._graphs = graphs or StepGraphs()
        self.step_costs = step_costs
        """Costs of decode steps by their tokens, if the configuration has speculation."""
        self.draft_model = draft_model
        self._sampler = Sampler(limits.vocab_size, paged.device, paged.clock)
        self.limits = limits
        self.adapters = adapters
        """The LoRA adapters that sequences may use, if the configuration allows any."""
        self.memory = MemoryGauge(paged.device)
        self.advice = ""
        """Options that free memory, each with its bytes: the end of a message about a lack of it."""
        self.nf4_weight_bytes = weight_bytes(paged.model)
        """Codes and scales of all NF4 layers."""
        self.expanded_weight_bytes = expanded_bytes(paged.model)
        """16-bit copies of NF4 weights."""
        self.kernel_times: Callable[[], KernelTimes] = read_cpu if paged.clock is None else reader_of(paged.clock)
        """Seconds of NF4 work up to the end of the last step whose results have been read."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._paged.device

    @property
    def tower(self) -> ImageTower | None:
        """The model's image tower, where it is loaded."""
        return self._paged.tower

    @property
    def states(self) -> StatePool | None:
        """The states of sequences, if the model has layers that keep some."""
        return None if self._paged.states is None else self._paged.states.pool

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations."""
        return self._paged.dtype

    @property
    def graph_replays(self) -> int:
        """CUDA graphs replayed so far."""
        return 0 if self._graphs.decode is None else self._graphs.decode.pool.replays

    @property
    def kernels(self) -> str:
        """NF4 kernels that run, in words."""
        return f"nf4_kernels {nf4_kernels.capabilities()[self.device.type]}"

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """Logits [len(step.sampled) and after them the scored positions, vocabulary] in float32; writes the cache."""
        return self._compute_together(self._paged.with_features(step_input(step)))

    def _compute_together(self, given: StepInput) -> torch.Tensor:
        """compute() by all ranks. Raises ExchangeError where this one fails, while others may wait for it."""
        if self._workers is None:
            return self.compute(given)
        with computed_by_all(given, self._workers):
            found = self.compute(given)
            if found.is_cuda:
                torch.cuda.synchronize(found.device)
        return found

    @torch.inference_mode()
    def compute(self, given: StepInput) -> torch.Tensor:
        """Compute forward()'s result for the columns of a step, or its hidden states."""
        batch = self._batch(given)
        found = self._compute(given, batch)
        if self.states is not None:
            self.states.copy(given.saved)
        return found

    def _compute(self, given: StepInput, batch: Batch) -> torch.Tensor:
        graphs = self._graphs
        if given.hidden:
            return self._paged.hidden_states(batch)
        if batch.images is not None:
            return self._paged.run(batch)
        for replayed in (graphs.decode, graphs.verify, graphs.mixed):
            if replayed is not None and replayed.fits(batch):
                return replayed.run(batch).logits.float()
        if graphs.decode is not None and graphs.batch_invariant:
            logits = torch.empty(len(batch.sampled_rows), self.limits.vocab_size, device=self.device)
            decode = graphs.decode
            run_in_groups(batch, lambda group: decode.run(group).logits, self._paged.block_size, logits)
            return logits
        return self._paged.run(batch)

    @torch.inference_mode()
    def execute(self, step: Step) -> list[Sampled]:
        """Compute a step: one result for each of step.sampled, in order."""
        if any(chunk.sequence.embeds for chunk in step.chunks):
            return self._execute_with_embeddings(step)
        step.read_drafts()
        logits, sequences = self.forward(step), sampled_sequences(step)
        if logits.shape[0] > len(sequences):
            score_prompts(step, logits[len(sequences) :])
            logits = logits[: len(sequences)]
        if sequences:
            return verified(step, self._sampler.sample(logits, sequences))
        if self._paged.clock is not None:
            self._paged.clock.note(self._paged.clock.totals)  # with tokens the sampler notes them
        return []

    def _execute_with_embeddings(self, step: Step) -> list[Sampled]:
        """execute() of a step in which sequences embed: they are computed after the others, by the model's own code."""
        others = Step([chunk for chunk in step.chunks if not chunk.sequence.embeds])
        sampled = iter(self.execute(others) if others.chunks else ())
        own = self._paged.with_features(step_input(Step([chunk for chunk in step.chunks if chunk.sequence.embeds])))
        vectors = iter(self._compute_together(replace(own, hidden=True)).cpu().numpy())
        if self._paged.clock is not None:
            self._paged.clock.note(self._paged.clock.totals)
        return [
            Sampled(0, embedding=next(vectors).tobytes()) if chunk.sequence.embeds else next(sampled)
            for chunk in step.sampled
        ]

    @torch.inference_mode()
    def execute_async(self, step: Step, previous: LaunchedStep | None) -> LaunchedStep | None:
        """Launch a decode step without waiting for its tokens; None where it has to be executed.

        It can be launched if it fits a CUDA graph and, with other ranks, all tokens are sampled from the model's raw logits
        and none is a draft token. previous is the step before it where that has not been read yet, which has no draft
        tokens, and then nor has this one. complete() of what is launched has to follow, once it has been.
        """
        workers, drafts = self._workers, bool(step.drafts)
        graphs = self._graphs.verify if drafts else self._graphs.decode
        if graphs is None or not step.samples_each or any(chunk.sequence.embeds for chunk in step.chunks):
            return None
        if workers is not None and (drafts or not step.is_raw):
            return None
        if drafts and not step.is_raw:
            step.read_drafts()  # penalties and grammars depend on them
        given = step_input(step)
        batch = self._batch(given)
        if batch.images is not None or not graphs.fits(batch):
            return None
        newest = None if previous is None else previous.tokens
        source = None if previous is None else rows_before(step, previous.step)
        if step.unread is not None:
            assert isinstance(step.unread, LaunchedDrafts)
            newest, source = step.unread.tokens, step.unread.source(step)
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        if workers is not None:
            table = RandomRows(step.sampled_sequences, self.limits.vocab_size).table()
            workers.compute(given, Launch(previous is not None, source, table))
            waiting = workers.waiting
        try:
            with waiting():
                output = graphs.run(batch, newest, source)
                return LaunchedStep(step, output, self._sampler, previous is None, waiting)
        except Exception as e:
            # The device's context is lost, or other ranks wait in the step.
            if workers is not None or isinstance(e, torch.AcceleratorError):
                raise
            logger.exception("launching a step of %d sequences failed", step.size)
            return None  # execute() computes it, or ends its requests

    @torch.inference_mode()
    def compute_as_worker(self, given: StepInput, launch: Launch | None) -> None:
        """Compute a step as rank 0 of the same model does, and sample its tokens if launch says how.

        The steps must come in the order in which rank 0 computes them.
        """
        if launch is None:
            self.compute(given)
            return
        assert self._graphs.decode is not None
        output = self._graphs.decode.run(self._batch(given), self._newest if launch.follows else None, launch.source)
        assert output.greedy is not None
        self._newest = sample_by_table(output.logits, launch.table, output.greedy[1])

    def _batch(self, given: StepInput) -> Batch:
        """The batch that computes a step, once the states that it begins with are in place."""
        if self.states is not None:
            self.states.copy(given.restored)
        return batch_of(given, self._paged.block_size)
