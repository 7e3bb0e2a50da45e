"""Executes steps: a runner takes a step's chunks and gives its sequences' next tokens. The package preparation builds it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

import nf4_kernels
from nf4_kernels.timing import KernelTimes, read_cpu, reader_of
from server.engine.runtime.batch import Batch, batch_of, check_batch
from server.engine.runtime.followers import Followers, followed
from server.engine.runtime.graphs.async_step import AsyncStep, Launch
from server.engine.runtime.graphs.decode import DecodeGraphs
from server.engine.runtime.graphs.invariant import run_in_groups
from server.engine.runtime.graphs.mixed import MixedGraphs
from server.engine.runtime.graphs.options_step import LaunchedStep, OptionsStep
from server.engine.runtime.graphs.verify import VerifyGraphs
from server.engine.runtime.limits import ModelLimits
from server.engine.runtime.memory import MemoryGauge
from server.engine.runtime.model.expanded import expanded_bytes
from server.engine.runtime.model.image_tower import ImageTower
from server.engine.runtime.model.lora_registry import AdapterRegistry
from server.engine.runtime.model.projections import weight_bytes
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.sampling.device_sampler import DeviceSampler
from server.engine.runtime.sampling.inverse_cdf import sampling_table
from server.engine.runtime.sampling.prompt_logprobs import score_prompts
from server.engine.runtime.sampling.sampler import Sampled, is_sampled_from_raw_logits, sample
from server.engine.runtime.speculation.draft_model import DraftModel
from server.engine.runtime.speculation.launched_guesses import LaunchedGuesses
from server.engine.runtime.speculation.verification import sampled_sequences
from server.engine.runtime.states.pool import StatePool
from server.engine.runtime.step_input import StepInput, step_input
from server.engine.runtime.trials import first_line
from server.engine.scheduling.errors import DataError
from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.step import Step
from server.engine.speculation.costs import StepCosts

logger = logging.getLogger(__name__)


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
        followers: Followers | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """sampler: samples with all options on the device; without one, those need the host between two steps."""
        self._paged = paged
        self._followers = followers
        self._newest: torch.Tensor | None = None
        self._graphs = graphs or StepGraphs()
        self.step_costs = step_costs
        """What decode steps cost by their tokens, where the configuration has speculation."""
        self.draft_model = draft_model
        """What guesses tokens, where the configuration has a draft model."""
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
    def looks_ahead(self) -> bool:
        """Whether grammars' look_ahead() saves time: it does on a GPU, unless all sequences' masks are found at once."""
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
        return self._compute_together(self._paged.with_features(step_input(step)))

    def _compute_together(self, given: StepInput) -> torch.Tensor:
        """compute() by all ranks. Raises ExchangeError where this one fails, while others may wait for it."""
        if self._followers is None:
            return self.compute(given)
        with followed(given, self._followers):
            found = self.compute(given)
            if found.is_cuda:
                torch.cuda.synchronize(found.device)
        return found

    @torch.inference_mode()
    def compute(self, given: StepInput) -> torch.Tensor:
        """What forward() gives for the columns of a step, or its hidden states."""
        batch, graphs = self._batch(given), self._graphs
        if given.hidden:
            return self._paged.hidden_states(batch)
        if batch.images is not None:
            return self._paged.run(batch)
        if given.guessed and graphs.verify is not None and graphs.verify.fits(batch):
            return graphs.verify.run(batch).float()
        if graphs.decode is not None and graphs.decode.fits(batch):
            return graphs.decode.run(batch).float()
        if graphs.mixed is not None and graphs.mixed.fits(batch):
            return graphs.mixed.run(batch).float()
        if graphs.decode is not None and graphs.batch_invariant:
            logits = torch.empty(len(batch.sampled_rows), self.limits.vocab_size, device=self.device)
            run_in_groups(batch, graphs.decode.run, self._paged.block_size, logits)
            return logits
        return self._paged.run(batch)

    @torch.inference_mode()
    def execute(self, step: Step) -> list[Sampled]:
        """Compute a step: one result for each of step.sampled, in order; with guesses one for each token of the step."""
        # What decodes does not embed.
        if any(chunk.sequence.embeds for chunk in step.others):
            return self._execute_with_embeddings(step)
        if self._followers is not None:
            step.read_guesses()  # the other ranks have them from this one
        checked = self._check_guesses(step) if step.guesses else None
        step.read_guesses()
        if checked is not None:
            return checked
        logits = self.forward(step)
        sequences = sampled_sequences(step) if step.guesses else step.sampled_sequences
        if logits.shape[0] > len(sequences):
            score_prompts(step, logits[len(sequences) :])
            logits = logits[: len(sequences)]
        results = self._sample(logits, sequences) if sequences else []
        if self._paged.clock is not None and (self._sampler is None or not sequences):
            self._paged.clock.note(self._paged.clock.totals)  # a DeviceSampler has noted them
        return results

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """A token for each row of logits, which may be overwritten; one for which there is none gets the reason."""
        if self._sampler is not None:
            return self._sampler.sample(logits, sequences)
        # The step is not computed again because of a grammar that fails: states would go on twice.
        kept = logits.clone() if any(sequence.constraint is not None for sequence in sequences) else logits
        try:
            return sample(logits, sequences)
        except DataError:
            return [_sample_alone(kept[row : row + 1], sequence) for row, sequence in enumerate(sequences)]

    def _check_guesses(self, step: Step) -> list[Sampled] | None:
        """execute() of a step with guesses whose tokens a CUDA graph finds; None where it needs more than that."""
        if not self._has_check(step):
            return None
        if self._followers is None:
            return self._replay_check(step).read()
        # The other ranks replay the same graph. This one alone samples, because it alone reads the tokens.
        with followed(step_input(step), self._followers):
            return self._replay_check(step).read()

    @torch.inference_mode()
    def launch_check(self, step: Step) -> LaunchedStep | None:
        """Launch a step with guesses without waiting for its tokens; None where it has to be executed.

        read() of what is launched gives a result for each token of the step.
        """
        if self._followers is not None:
            return None
        try:
            return self._replay_check(step) if self._has_check(step) else None
        except torch.AcceleratorError:
            raise  # the device's context is lost
        except Exception:
            logger.exception("launching a step of %d sequences with guesses failed", len(step.chunks))
            return None  # execute() finds the one that is at fault

    def _has_check(self, step: Step) -> bool:
        """Whether a CUDA graph finds the tokens of a step with guesses. It decodes only, so no image is in its chunks."""
        verify = self._graphs.verify
        if verify is None or step.num_tokens > verify.sizes[-1]:
            return False
        return all(is_sampled_from_raw_logits(chunk.sequence) for chunk in step.chunks)

    def _replay_check(self, step: Step) -> AsyncStep:
        verify, drafted = self._graphs.verify, step.drafted
        assert verify is not None

        def table() -> npt.NDArray[np.float64] | None:
            if all(chunk.sequence.sampling.temperature == 0 for chunk in step.chunks):
                return None
            return sampling_table(sampled_sequences(step), self.limits.vocab_size)

        batch = check_batch(step, self._paged.block_size)
        if drafted is None:
            return verify.run_async(step, batch, Launch(False, None, table), None)
        assert isinstance(drafted, LaunchedGuesses)
        return verify.run_async(step, batch, Launch(True, drafted.source(step), table), drafted.tokens)

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
        """Launch a step without waiting for its tokens, or None where that cannot be: it needs execute() then.

        It can be for a decode step that fits a CUDA graph and whose tokens are all sampled from the model's raw logits, or
        by a DeviceSampler. previous is the step before it where that has not been read yet. complete() of what is
        launched has to follow, once it has been.
        """
        graphs = self._graphs.decode
        if self._sampler is not None:
            return self._launch_with_options(step, previous, self._sampler)
        if graphs is None or not _is_raw_decode(step):
            return None
        assert not isinstance(previous, OptionsStep)
        given = step_input(step)
        batch = self._batch(given)
        if batch.images is not None or not graphs.fits(batch):
            return None
        launch = Launch.of(step, previous, self.limits.vocab_size)
        newest = None if previous is None else previous.tokens
        if self._followers is not None:
            self._followers.decode(given, launch)
        if self._followers is None:
            return graphs.run_async(step, batch, launch, newest)
        with self._followers.waiting():
            return replace(graphs.run_async(step, batch, launch, newest), waiting=self._followers.waiting)

    @torch.inference_mode()
    def follow(self, given: StepInput, launch: Launch | None) -> None:
        """Compute a step as another rank of the same model does, and sample its tokens where launch says how.

        The steps must come in the order in which the other rank computes them.
        """
        if launch is None:
            self.compute(given)
            return
        assert self._graphs.decode is not None
        newest = self._newest if launch.follows else None
        _, self._newest = self._graphs.decode.launch(self._batch(given), launch, newest)

    def _batch(self, given: StepInput) -> Batch:
        return batch_of(given, self._paged.block_size)

    def _launch_with_options(
        self, step: Step, previous: LaunchedStep | None, sampler: DeviceSampler
    ) -> OptionsStep | None:
        graphs = self._graphs.decode
        if graphs is None or not step.samples_each or any(chunk.sequence.embeds for chunk in step.others):
            return None
        batch = self._batch(step_input(step))
        if batch.images is not None or not graphs.fits(batch):
            return None
        try:
            return graphs.run_with_options(step, batch, previous, sampler)
        except torch.AcceleratorError:
            raise  # the device's context is lost
        except Exception:
            logger.exception("launching a step of %d sequences failed", step.size)
            return None  # execute() finds the one that is at fault


def _sample_alone(logits: torch.Tensor, sequence: Sequence) -> Sampled:
    try:
        return sample(logits, [sequence])[0]
    except DataError as e:
        return Sampled(0, error=f"the model failed: {type(e).__name__}: {first_line(e)}")


def _is_raw_decode(step: Step) -> bool:
    """Whether a step is one token of each sequence, behind which one is sampled from the model's logits as they are."""
    if step.decoding is not None and not step.decoding.is_raw:
        return False
    return step.samples_each and all(is_sampled_from_raw_logits(chunk.sequence) for chunk in step.others)
