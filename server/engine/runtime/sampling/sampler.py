"""Samples the next tokens of a step on its device, with all options: the host need not know the tokens before.

The options' state is on the device: counts of penalized sequences' tokens, biases, bans, masks of grammars. Tokens and
log-probabilities are copied to the host, which reads them later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from nf4_kernels.cuda.device_clock import DeviceClock
from server.engine.runtime.batch import ToHost
from server.engine.runtime.sampling.grammar_masks import MaskBuffer, is_permitted, permitted_by_masks
from server.engine.runtime.sampling.ops import largest_of_rows, ops_on, sample_by_table
from server.engine.runtime.sampling.penalty_table import PenaltyTable
from server.engine.runtime.sampling.step_plan import AdjustedRows, BoundRows, ScoredRows, StepPlan
from server.engine.scheduling.sequence import SamplingNeeds, Sequence
from server.types import TokenLogprob


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One sequence's next token, or why there is none, or the hidden state that it wanted instead of a token."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    embedding: bytes | None = None
    """The hidden state of a sequence that embeds: float32 little-endian."""
    accepted: tuple[Sampled, ...] = ()
    """The draft tokens that were sampled, too; `token` is then the bonus token behind them."""


@dataclass(frozen=True)
class ModelOutput:
    """Results of a step's forward pass on the device, for its S sequences; valid until the next one."""

    logits: torch.Tensor
    """[S, vocabulary]."""
    greedy: tuple[torch.Tensor, torch.Tensor] | None = None
    """float32 and int64 [S]: the best logit of each row, and which token has it."""
    newest: torch.Tensor | None = None
    """int64 [S]: each sequence's newest token, where the host may not know it."""


class LaunchedSample:
    """Tokens that are being sampled."""

    def __init__(
        self,
        sequences: list[Sequence],
        best: torch.Tensor,
        tokens: torch.Tensor,
        errors: dict[int, str],
        clock: DeviceClock | None = None,
    ) -> None:
        """best: float32 [S], the largest logits; it and tokens may be overwritten by what is launched after this.

        errors: by row, why a sequence gets no token. clock: notes its totals, which come with the tokens.
        """
        self._sequences = sequences
        self.tokens = tokens.clone()
        """int64 [S] on the device."""
        # One copy for all: tokens are exact in float32, and of the totals it has the bits.
        totals = () if clock is None else (clock.totals.flatten().view(torch.float32),)
        self._numbers = ToHost(torch.cat((best.float(), self.tokens.float(), *totals)))
        self._errors = errors
        self._clock = clock
        self._scored: ScoredRows | None = None
        self._logprobs: ToHost | None = None

    def add_logprobs(self, scored: ScoredRows, logits: torch.Tensor) -> None:
        """Have log-probabilities read, too: those of logits float32 [W, vocabulary]."""
        values = logits.log_softmax(-1)
        chosen = values.gather(1, self.tokens.index_select(0, scored.rows_on_device).unsqueeze(1))
        top = values.topk(scored.max_logprobs, dim=-1)
        self._scored = scored
        self._logprobs = ToHost(torch.cat((chosen, top.values, top.indices.float()), dim=1))

    def read(self) -> list[Sampled]:
        """Wait for the tokens: one result for each sequence."""
        best, found, totals = np.split(self._numbers.wait().numpy(), [len(self.tokens), 2 * len(self.tokens)])
        if self._clock is not None:
            self._clock.note(torch.from_numpy(totals).view(torch.int64).view(self._clock.totals.shape))
        tokens = found.astype(np.int64).tolist()
        errors, finite = self._errors, np.isfinite(best)
        if not finite.all():
            errors = dict.fromkeys(np.flatnonzero(~finite).tolist(), "the model's logits are not numbers") | errors
        logprobs = self._read_logprobs(tokens)
        if not errors and not logprobs:
            return [Sampled(token) for token in tokens]
        return [
            Sampled(0, error=errors[row]) if row in errors else Sampled(token, logprobs.get(row))
            for row, token in enumerate(tokens)
        ]

    def _read_logprobs(self, tokens: list[int]) -> dict[int, TokenLogprob]:
        scored, found = self._scored, dict[int, TokenLogprob]()
        if scored is None or self._logprobs is None:
            return found
        chosen, values, ids = np.split(self._logprobs.wait().numpy(), [1, 1 + scored.max_logprobs], axis=1)
        columns = zip(scored.rows, chosen[:, 0].tolist(), values.tolist(), ids.astype(np.int64).tolist(), strict=True)
        for row, logprob, top_values, top_ids in columns:
            wanted = self._sequences[row].sampling.logprobs or 0
            top = list(zip(top_ids[:wanted], top_values[:wanted], strict=True))
            found[row] = TokenLogprob(tokens[row], logprob, top)
        return found


class Sampler:
    """Samples on one device for a model of one vocabulary. Not thread-safe.

    Order: penalties, logit_bias and the min_tokens ban, grammars, (log-probabilities are taken here,) temperature, top_k,
    top_p, min_p.
    """

    def __init__(self, vocabulary: int, device: torch.device, clock: DeviceClock | None = None) -> None:
        """clock: the device's, where it times the kernels; it notes its totals with each step's tokens."""
        self._vocabulary = vocabulary
        self._device = device
        self._clock = clock
        self._masks = MaskBuffer(vocabulary, device)
        self._table: PenaltyTable | None = None
        self._plan: StepPlan | None = None

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """Next tokens from logits [len(sequences), vocabulary], waiting for them."""
        return self.launch(ModelOutput(logits), sequences).read()

    @torch.inference_mode()
    def launch(self, output: ModelOutput, sequences: list[Sequence]) -> LaunchedSample:
        """Sample without waiting for the device. Grammars must have taken all tokens before."""
        plan = self._plan_of(sequences)
        adjusted, errors = plan.adjusted, dict[int, str]()
        if adjusted is None or not adjusted.everything:
            best, tokens = output.greedy or largest_of_rows(output.logits)
            tokens = sample_by_table(output.logits, plan.random.table(), tokens)
        if adjusted is not None:
            logits = self._adjusted_logits(adjusted, output)
            own_best, own_tokens = largest_of_rows(logits)
            own_tokens = sample_by_table(logits, adjusted.random.table(), own_tokens)
            if adjusted.bound is not None:
                own_best, own_tokens = self._within_grammars(adjusted, logits, own_best, own_tokens, errors)
            if adjusted.everything:
                best, tokens = own_best, own_tokens
            else:
                best = best.index_copy(0, adjusted.rows_on_device, own_best)
                tokens = tokens.index_copy(0, adjusted.rows_on_device, own_tokens)
        launched = LaunchedSample(plan.sequences, best, tokens, errors, self._clock)
        if plan.scored is not None:
            scored = output.logits.index_select(0, plan.scored.raw).float()
            if adjusted is not None:
                scored = torch.cat((scored, logits.index_select(0, plan.scored.adjusted)))
            launched.add_logprobs(plan.scored, scored)
        return launched

    def _plan_of(self, sequences: list[Sequence]) -> StepPlan:
        plan = self._plan
        if plan is None or not plan.valid(sequences):
            self._plan = plan = None  # its sequences need no longer live
            if self._table is None and any(sequence.needs & SamplingNeeds.PENALTIES for sequence in sequences):
                self._table = PenaltyTable(self._vocabulary, self._device)
            plan = self._plan = StepPlan(sequences, self._vocabulary, self._device, self._table)
        return plan

    def _adjusted_logits(self, adjusted: AdjustedRows, output: ModelOutput) -> torch.Tensor:
        """Logits float32 [A, vocabulary] of the sequences whose logits are changed, without regard to grammars."""
        rows, penalized = adjusted.rows_on_device, adjusted.penalized
        if penalized is None or self._table is None:
            every = adjusted.everything
            logits = (
                output.logits.to(torch.float32, copy=True) if every else output.logits.index_select(0, rows).float()
            )
        else:
            count = len(penalized.sequences)
            logits = self._table.penalize(output.logits, rows[:count], penalized, output.newest)
            if count < len(rows):
                logits = torch.cat((logits, output.logits.index_select(0, rows[count:]).float()))
        flat = logits.view(-1)
        if adjusted.bias is not None:
            places, values = adjusted.bias
            flat[places] = flat[places] + values
        if adjusted.bans is not None:
            flat.index_fill_(0, adjusted.bans, -math.inf)
        return logits

    def _within_grammars(
        self,
        adjusted: AdjustedRows,
        logits: torch.Tensor,
        best: torch.Tensor,
        tokens: torch.Tensor,
        errors: dict[int, str],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest logits and tokens [A] that grammars permit; logits [A, vocabulary] are masked in place where needed.

        best, tokens: those without regard to grammars. errors gets a reason for each row whose grammar cannot be followed.
        """
        bound = adjusted.bound
        if bound is not None and self._device.type == "cpu":
            bound = self._in_need_of_masks(bound, tokens.tolist())
        if bound is None:
            return best, tokens
        masks, failed = self._masks.find(bound.sequences)
        errors.update((adjusted.rows[bound.places[index]], reason) for index, reason in failed.items())
        places = bound.places_on_device
        ops_on(self._device).mask_rows(logits, places, masks)
        permitted = logits if len(bound.places) == len(logits) else logits.index_select(0, places)
        own_best, own_tokens = largest_of_rows(permitted)
        own_tokens = sample_by_table(permitted, bound.random.table(), own_tokens)
        if any(bound.tried):
            free = tokens.index_select(0, places)
            keep = bound.tried_on_device & permitted_by_masks(masks, free)
            own_best = torch.where(keep, best.index_select(0, places), own_best)
            own_tokens = torch.where(keep, free, own_tokens)
        return best.index_copy(0, places, own_best), tokens.index_copy(0, places, own_tokens)

    def _in_need_of_masks(self, bound: BoundRows, tokens: list[int]) -> BoundRows | None:
        """Those whose tokens, [A], are not final; the host knows the tokens. None: all are.

        Asking about one token takes a thousandth of the time of finding all that are permitted.
        """
        needing = [
            (sequence, place)
            for sequence, place, tried in zip(bound.sequences, bound.places, bound.tried, strict=True)
            if sequence.sampling.logprobs is not None
            or not (tried or sequence.sampling.temperature == 0)
            or not is_permitted(tokens[place], sequence)
        ]
        if not needing:
            return None
        sequences, places = (list(column) for column in zip(*needing, strict=True))
        return BoundRows.of(sequences, places, self._vocabulary, self._device)
