"""Executes steps: a step's chunks in, its sequences' next tokens out. The preparation room builds a runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import nf4_kernels
from nf4_kernels.timing import KernelTimes, read_cpu, reader_of
from server.engine.runtime.batch import Batch, build_batch
from server.engine.runtime.graphs.async_step import LaunchedStep
from server.engine.runtime.graphs.decode import DecodeGraphs
from server.engine.runtime.graphs.invariant import in_groups
from server.engine.runtime.graphs.mixed import MixedGraphs
from server.engine.runtime.graphs.verify import VerifyGraphs
from server.engine.runtime.limits import ModelLimits
from server.engine.runtime.memory import MemoryGauge
from server.engine.runtime.model.expanded import expanded_bytes
from server.engine.runtime.model.lora_registry import AdapterRegistry
from server.engine.runtime.model.projections import weight_bytes
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.sampling.device_sampler import DeviceSampler
from server.engine.runtime.sampling.prompt_logprobs import score_prompts
from server.engine.runtime.sampling.sampler import Sampled, is_sampled_from_raw_logits, sample
from server.engine.runtime.verification import sampled_sequences
from server.engine.scheduling.scheduler import Step
from server.engine.speculation.costs import StepCosts


@dataclass(frozen=True)
class StepGraphs:
    """The CUDA graphs that steps are replayed from, where there are any."""

    decode: DecodeGraphs | None = None
    mixed: MixedGraphs | None = None
    verify: VerifyGraphs | None = None
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
        sampler: DeviceSampler | None = None,
    ) -> None:
        """sampler: samples with all options on the device; without one, those need the host between two steps."""
        self._paged = paged
        self._graphs = graphs or StepGraphs()
        self.step_costs = step_costs
        """What decode steps cost by their tokens, where the configuration has speculation."""
        self._sampler = sampler
        self.limits = limits
        """What the model and the cache allow."""
        self.adapters = adapters
        """The LoRA adapters that sequences may use, if the configuration allows any."""
        self.memory = MemoryGauge(paged.device)
        """The device's memory."""
        self.nf4_weight_bytes = weight_bytes(paged.model)
        """Codes and scales of all NF4 layers."""
        self.expanded_weight_bytes = expanded_bytes(paged.model)
        """16-bit copies of NF4 weights."""
        self.kernel_times: Callable[[], KernelTimes] = read_cpu if paged.clock is None else reader_of(paged.clock)
        """Seconds of NF4 work up to the end of the last step whose results have been read."""

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._paged.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations."""
        return self._paged.dtype

    @property
    def looks_ahead(self) -> bool:
        """Whether it gains from grammars' look_ahead(): where a GPU computes and nothing finds masks of many at once."""
        return self.device.type != "cpu" and self._sampler is None

    @property
    def graph_replays(self) -> int:
        """CUDA graphs replayed so far."""
        return 0 if self._graphs.decode is None else self._graphs.decode.pool.replays

    @property
    def kernels(self) -> str:
        """Which NF4 kernels run, in words."""
        return f"nf4_kernels {nf4_kernels.capabilities()[self.device.type]}"

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """Logits [len(step.sampled) and after them the scored positions, vocabulary] in float32; writes the cache."""
        batch, graphs = self._batch(step), self._graphs
        if step.guesses and graphs.verify is not None and graphs.verify.fits(batch):
            return graphs.verify.run(batch).float()
        if graphs.decode is not None and graphs.decode.fits(batch):
            return graphs.decode.run(batch).float()
        if graphs.mixed is not None and graphs.mixed.fits(batch):
            return graphs.mixed.run(batch).float()
        if graphs.decode is not None and graphs.batch_invariant:
            return self._run_in_groups(batch, graphs.decode)
        return self._paged.run(batch)

    @torch.inference_mode()
    def execute(self, step: Step) -> list[Sampled]:
        """Compute a step: one result for each of step.sampled, in order; with guesses one for each token of the step."""
        if any(chunk.sequence.embeds for chunk in step.chunks):
            return self._execute_with_embeddings(step)
        logits = self.forward(step)
        sampled = step.sampled
        if logits.shape[0] > len(sampled) and not step.guesses:
            score_prompts(step, logits[len(sampled) :])
            logits = logits[: len(sampled)]
        sequences = sampled_sequences(step) if step.guesses else [chunk.sequence for chunk in sampled]
        choose = sample if self._sampler is None else self._sampler.sample
        results = choose(logits, sequences) if sampled else []
        if self._paged.clock is not None:
            self._paged.clock.note(self._paged.clock.totals)
        return results

    def _execute_with_embeddings(self, step: Step) -> list[Sampled]:
        """execute() of a step in which sequences embed: they are computed after the others, by the model's own code."""
        others = Step([chunk for chunk in step.chunks if not chunk.sequence.embeds])
        sampled = iter(self.execute(others) if others.chunks else ())
        states = self._paged.hidden_states(self._batch(Step([c for c in step.chunks if c.sequence.embeds])))
        vectors = iter(states.cpu().numpy())
        if self._paged.clock is not None:
            self._paged.clock.note(self._paged.clock.totals)
        return [
            Sampled(0, embedding=next(vectors).tobytes()) if chunk.sequence.embeds else next(sampled)
            for chunk in step.sampled
        ]

    @torch.inference_mode()
    def execute_async(self, step: Step, previous: LaunchedStep | None) -> LaunchedStep | None:
        """Launch a step without waiting for its tokens, or None where that cannot be: it needs execute() then.

        It can be for a decode step that fits a CUDA graph and whose tokens are all sampled from the model's raw logits, or
        by a DeviceSampler. previous is the step before it where that has not been read yet. complete() of what is
        launched has to follow, once it has been.
        """
        graphs, sampler = self._graphs.decode, self._sampler
        if graphs is None or not all(
            c.samples
            and c.length == 1
            and not c.sequence.embeds
            and (sampler is not None or is_sampled_from_raw_logits(c.sequence))
            for c in step.chunks
        ):
            return None
        batch = self._batch(step)
        return graphs.run_async(step, batch, previous, sampler) if graphs.fits(batch) else None

    def _batch(self, step: Step) -> Batch:
        return build_batch(step, self._paged.block_size, self.device)

    def _run_in_groups(self, batch: Batch, graphs: DecodeGraphs) -> torch.Tensor:
        wanted = batch.sampled_rows.tolist()
        logits = torch.empty(len(wanted), self.limits.vocab_size, device=self.device)
        for first, group in in_groups(batch, self._paged.block_size):
            found = graphs.run(group)
            for index, row in enumerate(wanted):
                if first <= row < first + group.num_tokens:
                    logits[index] = found[row - first]
        return logits
