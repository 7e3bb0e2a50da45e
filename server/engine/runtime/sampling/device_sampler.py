"""Samples the next tokens of a step on its device, with all options: the host need not know the tokens before.

The options' state is on the device: counts of penalized sequences' tokens, biases, bans, masks of grammars. What comes
out is what sampler.sample() gives; tokens and log-probabilities are copied to the host, which reads them later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from nf4_kernels.cuda.device_clock import DeviceClock
from server.engine.runtime.sampling.grammar_masks import MaskBuffer, mask, permitted_by_masks
from server.engine.runtime.sampling.penalty_table import PenaltyTable
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.runtime.sampling.step_plan import AdjustedRows, ScoredRows, StepPlan
from server.engine.runtime.transfers.host_results import HostResults, Posted
from server.engine.scheduling.sequence import Sequence
from server.types import TokenLogprob


@dataclass(frozen=True)
class ModelOutput:
    """What a step's forward pass leaves on the device for its S sequences; valid until the next one."""

    logits: torch.Tensor
    """[S, vocabulary]."""
    greedy: tuple[torch.Tensor, torch.Tensor] | None = None
    """float32 and int64 [S]: the best logit of each row, and which token has it."""
    newest: torch.Tensor | None = None
    """int64 [S]: each sequence's newest token, where the host may not know it."""


class LaunchedSample:
    """Tokens that are being sampled."""

    def __init__(self, plan: StepPlan, posted: Posted, errors: dict[int, str]) -> None:
        """posted: the tokens and the largest logits. errors: by row, why a sequence gets no token."""
        self._posted = posted
        self._count = len(plan.sequences)
        self._sequences = plan.sequences
        self._errors = errors
        self._columns: list[torch.Tensor] = []
        self._scored: list[ScoredRows] = []
        self._copied: torch.Tensor | None = None
        self._done: torch.cuda.Event | None = None

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [S] on the device."""
        return self._posted.tokens

    def add_logprobs(self, scored: ScoredRows, logits: torch.Tensor) -> None:
        """Have log-probabilities read, too: those of logits [rows, vocabulary]."""
        values = (logits if scored.at is None else logits.index_select(0, scored.at)).float().log_softmax(-1)
        chosen = values.gather(1, self.tokens.index_select(0, scored.rows_on_device).unsqueeze(1))
        top = values.topk(scored.most, dim=-1)
        self._scored.append(scored)
        self._columns.append(torch.cat((chosen, top.values, top.indices.float()), dim=1).view(-1))

    def copy(self) -> None:
        """Begin to copy log-probabilities to the host."""
        if not self._columns:
            return
        packed = torch.cat(self._columns)
        self._columns.clear()
        if not packed.is_cuda:
            self._copied = packed
            return
        self._copied = torch.empty(packed.shape, dtype=torch.float32, pin_memory=True)
        self._copied.copy_(packed, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record()

    def read(self) -> list[Sampled]:
        """Wait for the tokens: one result for each sequence."""
        numbers, count = self._posted.wait().numpy(), self._count
        tokens = numbers[count:].astype(np.int64).tolist()
        logprobs: dict[int, TokenLogprob] = {}
        if self._copied is not None:
            if self._done is not None:
                self._done.synchronize()
            logprobs = self._logprobs(tokens, self._copied.numpy())
        errors = self._errors
        finite = np.isfinite(numbers[:count])
        if not finite.all():
            errors = dict.fromkeys(np.flatnonzero(~finite).tolist(), "the model's logits are not numbers") | errors
        if not errors and not logprobs:
            return [Sampled(token) for token in tokens]
        return [
            Sampled(0, error=errors[row]) if row in errors else Sampled(token, logprobs.get(row))
            for row, token in enumerate(tokens)
        ]

    def _logprobs(self, tokens: list[int], numbers: npt.NDArray[np.float32]) -> dict[int, TokenLogprob]:
        found: dict[int, TokenLogprob] = {}
        begin = 0
        for scored in self._scored:
            rows, most = scored.rows, scored.most
            end = begin + len(rows) * (1 + 2 * most)
            table = numbers[begin:end].reshape(len(rows), 1 + 2 * most)
            begin = end
            chosen, values = table[:, 0].tolist(), table[:, 1 : 1 + most].tolist()
            ids = table[:, 1 + most :].astype(np.int64).tolist()
            for i, row in enumerate(rows):
                wanted = self._sequences[row].sampling.logprobs or 0
                top = list(zip(ids[i][:wanted], values[i][:wanted], strict=True))
                found[row] = TokenLogprob(tokens[row], chosen[i], top)
        return found


class DeviceSampler:
    """Samples on one device for a model of one vocabulary. Not thread-safe."""

    def __init__(self, vocabulary: int, device: torch.device, clock: DeviceClock | None = None) -> None:
        """clock: the device's, where it times the kernels; it notes its totals with each step's tokens."""
        self._vocabulary = vocabulary
        self._device = device
        self._results = HostResults(clock)
        self._masks = MaskBuffer(vocabulary, device)
        self._table: PenaltyTable | None = None
        self._plan: StepPlan | None = None

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """Next tokens from logits [len(sequences), vocabulary], as sampler.sample(), waiting for them."""
        return self.launch(ModelOutput(logits), sequences).read()

    @torch.inference_mode()
    def launch(self, output: ModelOutput, sequences: list[Sequence]) -> LaunchedSample:
        """Sample without waiting for the device. Grammars must have taken all tokens before."""
        plan = self._plan_of(sequences)
        lengths = np.array([len(s.tokens) for s in sequences], np.int64) if plan.is_random else np.zeros(0, np.int64)
        adjusted, errors = plan.adjusted, dict[int, str]()
        if adjusted is None or not adjusted.everything:
            best, tokens = output.greedy or output.logits.max(dim=-1)
            best, tokens = best.float(), plan.random.sample(output.logits, lengths, tokens)
        if adjusted is not None:
            logits, own_best, own_tokens = self._sample_adjusted(adjusted, output, lengths, errors)
            if adjusted.everything:
                best, tokens = own_best, own_tokens
            else:
                best = best.index_copy(0, adjusted.rows_on_device, own_best)
                tokens = tokens.index_copy(0, adjusted.rows_on_device, own_tokens)
        launched = LaunchedSample(plan, self._results.post(best, tokens), errors)
        if plan.scored_raw is not None:
            launched.add_logprobs(plan.scored_raw, output.logits)
        if plan.scored_adjusted is not None:
            launched.add_logprobs(plan.scored_adjusted, logits)
        launched.copy()
        return launched

    def _plan_of(self, sequences: list[Sequence]) -> StepPlan:
        plan = self._plan
        if plan is None or not plan.valid(sequences):
            self._plan = None  # its sequences need no longer live
            if self._table is None and any(sequence.is_penalized for sequence in sequences):
                self._table = PenaltyTable(self._vocabulary, self._device)
            plan = self._plan = StepPlan(sequences, self._vocabulary, self._device, self._table)
        return plan

    def _sample_adjusted(
        self, adjusted: AdjustedRows, output: ModelOutput, lengths: npt.NDArray[np.int64], errors: dict[int, str]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits float32 [A, vocabulary], largest ones and tokens [A] of the sequences whose logits are changed."""
        logits = self._penalized(adjusted, output)
        flat = logits.view(-1)
        if adjusted.bias is not None:
            places, values = adjusted.bias
            flat[places] = flat[places] + values
        if adjusted.bans is not None:
            flat.index_fill_(0, adjusted.bans, -math.inf)
        if len(lengths):
            lengths = lengths[adjusted.rows]
        if not adjusted.constrained:
            best, tokens = logits.max(dim=-1)
            return logits, best, adjusted.random.sample(logits, lengths, tokens)
        return logits, *self._sample_constrained(adjusted, logits, lengths, errors)

    def _penalized(self, adjusted: AdjustedRows, output: ModelOutput) -> torch.Tensor:
        """A copy of the adjusted sequences' logits, float32 [A, vocabulary], penalized where that is asked for."""
        rows, logits = adjusted.rows_on_device, output.logits
        if adjusted.penalized is None or self._table is None:
            return logits.to(torch.float32, copy=True) if adjusted.everything else logits.index_select(0, rows).float()
        count = len(adjusted.penalized.sequences)
        penalized = self._table.penalize(logits, rows[:count], adjusted.penalized, output.newest)
        if count == len(rows):
            return penalized
        return torch.cat((penalized, logits.index_select(0, rows[count:]).float()))

    def _sample_constrained(
        self, adjusted: AdjustedRows, logits: torch.Tensor, lengths: npt.NDArray[np.int64], errors: dict[int, str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest logits and tokens [A], once logits, which are masked in place, are those that grammars permit.

        A token whose choice needs no filter is sampled without regard to the grammar first, and again among those
        permitted where the grammar refuses it, as sampler.sample() does.
        """
        assert self._plan is not None
        own = [self._plan.sequences[row] for row in adjusted.rows]
        bound = [own[place] for place in adjusted.constrained]
        masks, failed = self._masks.find(bound)
        errors.update((adjusted.rows[adjusted.constrained[index]], reason) for index, reason in failed.items())
        if len(adjusted.tried):
            free_best, free_tokens = logits.max(dim=-1)
            free_tokens = adjusted.tried.sample(logits, lengths, free_tokens)
        mask(logits, adjusted.constrained_on_device, masks)
        best, tokens = logits.max(dim=-1)
        tokens = adjusted.random.sample(logits, lengths, tokens)
        if len(adjusted.tried):
            tokens = adjusted.tried.sample(logits, lengths, tokens, again=True)
            places = adjusted.tried_places
            permitted = torch.zeros_like(tokens, dtype=torch.bool)
            permitted[places] = permitted_by_masks(masks[adjusted.tried_masks], free_tokens[places])
            best, tokens = torch.where(permitted, free_best, best), torch.where(permitted, free_tokens, tokens)
        return best, tokens
