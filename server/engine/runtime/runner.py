"""Runs the model: a step's chunks in, its sequences' next tokens out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

import nf4_kernels
from nf4_kernels.cuda import load_error, start_clock
from nf4_kernels.timing import KernelTimes, read_cpu, reader_of
from server.checkpoint.base import Progress
from server.config import EngineConfig
from server.engine.runtime.attention.base import AttentionBackend, attending
from server.engine.runtime.attention.factory import create_backend
from server.engine.runtime.attention.flashinfer import FlashInferBackend
from server.engine.runtime.attention.paged_cpu import PagedCpuBackend
from server.engine.runtime.attention.probe import probe_layers
from server.engine.runtime.batch import Batch, Span, build_batch
from server.engine.runtime.compile.layers import CompileError, compile_layers
from server.engine.runtime.graphs.decode import DecodeGraphs, Launched, ladder
from server.engine.runtime.graphs.invariant import INVARIANT_ROWS, in_groups
from server.engine.runtime.graphs.mixed import MixedGraphs, trial_steps
from server.engine.runtime.limits import (
    CPU_CACHE_BYTES,
    EngineConfigError,
    model_limits,
    own_limit,
    sequence_limit,
    token_budget,
)
from server.engine.runtime.memory import MemoryGauge, cache_bytes
from server.engine.runtime.model.cpu_linear import use_cpu_kernels
from server.engine.runtime.model.lora import adding
from server.engine.runtime.model.lora_registry import install_adapters
from server.engine.runtime.model.projections import replace_projections, weight_bytes
from server.engine.runtime.model.weight_order import link_products
from server.engine.runtime.sampling.inverse_cdf import use_device_draws
from server.engine.runtime.sampling.prompt_logprobs import score_prompts
from server.engine.runtime.sampling.sample import Sampled, is_drawn_from_own_logits, sample
from server.engine.runtime.trials import failure, relative_error
from server.engine.scheduling.scheduler import Step
from server.engine.scheduling.sequence import Sequence
from server.types import GenerateRequest, SamplingParams

logger = logging.getLogger(__name__)

# Compiled layers are tried on so many tokens, and may differ from the model's own code by rounding only, in the norm of
# all logits: a single token's can be so ill conditioned that rounding alone moves them by a thousandth.
TRIALS = (1, 7, 17)
TRIAL_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class ModelRunner:
    """A transformers model over a paged cache. Not thread-safe."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        self._model = model
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._block_size = config.block_size
        replace_projections(model)
        self.nf4_weight_bytes = weight_bytes(model)
        """Codes and scales of all NF4 layers."""
        if self._device.type == "cpu":
            use_cpu_kernels(model)
        else:
            use_device_draws(self._device, self._dtype, model.config.get_text_config().vocab_size)
        self.adapters = install_adapters(model, config)
        """The LoRA adapters that sequences may use, if the configuration allows any."""
        shapes, options = probe_layers(model)
        self._graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self.memory = MemoryGauge(self._device)
        """The device's memory."""
        self._invariant = False
        self._clock = start_clock(self._device) if self._device.type == "cuda" and load_error() is None else None
        self.kernel_times: Callable[[], KernelTimes] = read_cpu if self._clock is None else reader_of(self._clock)
        """Seconds of NF4 work up to the end of the last step whose results have been read."""

        def make_backend(num_blocks: int) -> AttentionBackend:
            return create_backend(shapes, options, num_blocks, config.block_size, self._dtype, self._device)

        per_block = config.block_size * sum(shape.bytes_per_token(self._dtype.itemsize) for shape in shapes)
        budget = config.kv_cache_bytes
        if budget is None and self._device.type == "cuda":
            try:
                budget = cache_bytes(lambda: self._largest_step(make_backend, config) * per_block, self._device)
            except torch.OutOfMemoryError as e:
                raise EngineConfigError(
                    f"beside the weights there is no memory for a step of {token_budget(config, self._device)} tokens;"
                    " engine.max_num_batched_tokens sets its size"
                ) from e
        self.limits = model_limits(model, per_block, config, CPU_CACHE_BYTES if budget is None else budget)
        self._backend = make_backend(self.limits.num_blocks)

    def prepare(self, config: EngineConfig, progress: Progress) -> None:
        """Compile the layers, capture decode steps (CUDA); engine.enforce_eager leaves that out."""
        if config.batch_invariant and (config.enforce_eager or self._device.type != "cuda"):
            raise EngineConfigError("engine.batch_invariant needs CUDA, and engine.enforce_eager off")
        self._invariant = config.batch_invariant
        if config.enforce_eager:
            return
        with torch.inference_mode():
            if isinstance(self._backend, FlashInferBackend):
                link_products(self._model, self._trial)
                self._graphs = DecodeGraphs(
                    self._model,
                    self._backend,
                    self._block_size,
                    self._clock,
                    self.adapters.slots if self.adapters else 0,
                )
                sizes = [INVARIANT_ROWS] if config.batch_invariant else ladder(sequence_limit(config, self._device))
                self._backend.set_up_graphs(self.limits.max_model_len, max(sizes), not config.batch_invariant)
                self._graphs.capture(sizes, progress)
            if isinstance(self._backend, FlashInferBackend | PagedCpuBackend):
                compiled = self._compile_layers(progress)
                if compiled and self._graphs is not None and not config.batch_invariant:
                    self._capture_mixed(self._graphs, config, progress)

    def _capture_mixed(self, graphs: DecodeGraphs, config: EngineConfig, progress: Progress) -> None:
        """Capture steps with prompts, too, and use them if they compute what the same layers compute without."""
        assert isinstance(self._backend, FlashInferBackend)
        sequences, budget = sequence_limit(config, self._device), token_budget(config, self._device)
        mixed = MixedGraphs(self._model, self._backend, self._block_size, sequences, self._clock, graphs.pool)

        def attempt() -> None:
            mixed.capture(max(budget, sequences), progress)
            for batch in trial_steps(self._first_chunk, self._block_size, self.limits):
                if mixed.fits(batch):
                    expected = self._run(batch)
                    wrong = self._difference(mixed.run(batch).float(), expected, batch.num_tokens)
                    if wrong is not None:
                        raise ValueError(f"logits {wrong}")

        failed = failure(attempt)
        if failed is None:
            self._mixed_graphs = mixed
        else:
            logger.warning("steps with prompts run without CUDA graphs, more slowly: %s", failed)

    def _compile_layers(self, progress: Progress) -> bool:
        """Run compiled layers if they can be compiled and compute what the model's own code computes; whether they do."""
        layers = list(self._model.get_decoder().layers)
        plain = [self._trial(count) for count in TRIALS]
        try:
            undo = compile_layers(layers, self._trial, progress)
        except CompileError as e:
            logger.warning("the model's layers run without torch.compile, more slowly: %s", e)
            return False
        try:
            wrong = self._disagreement(plain)
        except torch.AcceleratorError:
            raise  # the device's context is lost
        except Exception as e:
            wrong = f"fail: {type(e).__name__}: {(str(e).splitlines() or ['no message'])[0]}"
        if wrong is not None:
            undo()
            logger.error("compiled layers %s; the model runs without them", wrong)
        return wrong is None

    def _disagreement(self, plain: list[torch.Tensor]) -> str | None:
        """How the trials' logits differ from plain by more than rounding, in words."""
        for count, expected in zip(TRIALS, plain, strict=True):
            wrong = self._difference(self._trial(count), expected, count)
            if wrong is not None:
                return wrong
        return None

    def _difference(self, logits: torch.Tensor, expected: torch.Tensor, count: int) -> str | None:
        """How logits of a step of count tokens differ from those expected by more than rounding, in words."""
        error = relative_error(logits, expected)
        return None if error < TRIAL_TOLERANCES[self._dtype] else f"are off by {error:.1e} with {count} tokens"

    @torch.inference_mode()
    def _largest_step(self, make_backend: Callable[[int], AttentionBackend], config: EngineConfig) -> int:
        """Run as large a step as the scheduler may make, in a cache that holds just that; returns the cache's blocks."""
        sequences = sequence_limit(config, self._device)
        count = max(token_budget(config, self._device), sequences)
        length = min(count, own_limit(self._model.config.get_text_config()) or count)
        blocks_each = -(-length // self._block_size)
        spans = []
        num_blocks = 0
        for row in range(0, count, length):
            own = min(length, count - row)
            end = num_blocks + -(-own // self._block_size)
            spans.append(Span(row, 0, own, tuple(range(num_blocks, end))))
            num_blocks = end
        self._backend = make_backend(num_blocks)
        rows = torch.arange(count, device=self._device)
        positions = rows % length
        slots = rows // length * blocks_each * self._block_size + positions
        vocabulary = self._model.config.get_text_config().vocab_size
        wanted = rows[-sequences:]
        batch = Batch(rows % vocabulary, positions, slots, wanted, tuple(spans), int(count == 1))
        params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
        drawn = Sequence(GenerateRequest("largest step", [0], params), seed=0)
        sample(self._run(batch), [drawn] * len(wanted))
        del self._backend
        return num_blocks

    def _trial(self, count: int) -> torch.Tensor:
        """Logits [count, vocabulary] of a first chunk of count tokens."""
        return self._run(self._first_chunk(count))

    def _first_chunk(self, count: int) -> Batch:
        """A step of one sequence's first count tokens, in the cache's first blocks, all of whose logits are wanted."""
        rows = torch.arange(count, device=self._device)
        # Not from the first id on: that is often padding, whose embedding is zero.
        ids = (rows + 101) % self._model.config.get_text_config().vocab_size
        blocks = tuple(range(-(-count // self._block_size)))
        return Batch(ids, rows, rows, rows, (Span(0, 0, count, blocks),), int(count == 1))

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations."""
        return self._dtype

    @property
    def graph_replays(self) -> int:
        """CUDA graphs started so far."""
        return 0 if self._graphs is None else self._graphs.pool.replays

    @property
    def kernels(self) -> str:
        """Which NF4 kernels run, in words."""
        return f"nf4_kernels {nf4_kernels.capabilities()[self._device.type]}"

    @torch.inference_mode()
    def forward(self, step: Step) -> torch.Tensor:
        """Logits [len(step.sampled) and after them the scored positions, vocabulary] in float32; writes the cache."""
        batch = build_batch(step, self._block_size, self._device)
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch).float()
        if self._mixed_graphs is not None and self._mixed_graphs.fits(batch):
            return self._mixed_graphs.run(batch).float()
        return self._run_in_groups(batch, self._graphs) if self._graphs and self._invariant else self._run(batch)

    @torch.inference_mode()
    def execute(self, step: Step) -> list[Sampled]:
        """Compute a step: one result for each of step.sampled, in order."""
        logits = self.forward(step)
        sampled = step.sampled
        if logits.shape[0] > len(sampled):
            score_prompts(step, logits[len(sampled) :])
            logits = logits[: len(sampled)]
        results = sample(logits, [chunk.sequence for chunk in sampled]) if sampled else []
        if self._clock is not None:
            self._clock.note(self._clock.totals)
        return results

    @torch.inference_mode()
    def launch(self, step: Step, previous: Launched | None) -> Launched | None:
        """Start a step without waiting for its tokens, or None where that cannot be: it needs execute() then.

        It can for a decode step of a CUDA graph in which every token comes from the model's own logits and nothing
        else is asked for. previous is the step before it where that has not been read yet.
        """
        if self._graphs is None or not all(
            c.samples and c.length == 1 and is_drawn_from_own_logits(c.sequence) for c in step.chunks
        ):
            return None
        batch = build_batch(step, self._block_size, self._device)
        return self._graphs.launch(step, batch, previous) if self._graphs.fits(batch) else None

    def _run_in_groups(self, batch: Batch, graphs: DecodeGraphs) -> torch.Tensor:
        wanted = batch.sampled_rows.tolist()
        logits = torch.empty(len(wanted), self.limits.vocab_size, device=self._device)
        for first, group in in_groups(batch, self._block_size):
            found = graphs.run(group)
            for index, row in enumerate(wanted):
                if first <= row < first + group.num_tokens:
                    logits[index] = found[row - first]
        return logits

    def _run(self, batch: Batch) -> torch.Tensor:
        self._backend.begin(batch)
        with attending(self._backend), adding(batch, self.adapters.slots if self.adapters else 0):
            output: Any = self._model(
                input_ids=batch.ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=batch.sampled_rows,
            )
        if self._clock is not None:
            self._clock.collect()
        logits: torch.Tensor = output.logits[0]
        return logits.float()
