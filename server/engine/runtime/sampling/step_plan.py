"""Per-step sampling options as tensors on the device, cached while the batch is unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from server.engine.runtime.batch import to_device
from server.engine.runtime.sampling.penalty_table import PenalizedRows, PenaltyTable
from server.engine.runtime.sampling.random_rows import RESAMPLING_OFFSET, RandomRows, is_filtered
from server.engine.scheduling.sequence import SamplingNeeds, Sequence


@dataclass(frozen=True)
class ScoredRows:
    """The W sequences that want log-probabilities: those of raw logits first, then those of adjusted ones."""

    rows: list[int]
    """[W]: their rows of the step."""
    rows_on_device: torch.Tensor
    """int64 [W]: rows."""
    raw: torch.Tensor
    """int64: the rows of the step's logits."""
    adjusted: torch.Tensor
    """int64: the rows of the adjusted logits."""
    max_logprobs: int


@dataclass(frozen=True)
class BoundRows:
    """C of the adjusted sequences, which grammars bound."""

    sequences: list[Sequence]
    places: list[int]
    """[C]: their rows of the adjusted logits."""
    places_on_device: torch.Tensor
    """int64 [C]: places."""
    random: RandomRows
    """Those with a temperature, as rows of the C, for sampling among the permitted tokens."""
    tried: list[bool]
    """[C]: whether a token that was sampled without regard to the grammar is kept if the grammar permits it."""
    tried_on_device: torch.Tensor
    """bool [C]: tried."""

    @classmethod
    def of(cls, sequences: list[Sequence], places: list[int], vocabulary: int, device: torch.device) -> BoundRows:
        """places: those of the sequences. With a temperature and no filter a token is tried first.

        With p the token's probability and z that of all permitted tokens, a permitted token still comes up with
        p + (1 - z) p / z = p / z. So on CPU, where the token is known at once, most steps need no mask.
        """
        tried = [sequence.sampling.temperature > 0 and not is_filtered(sequence) for sequence in sequences]
        random = RandomRows(sequences, vocabulary, shifts=[RESAMPLING_OFFSET * own for own in tried])
        return cls(
            sequences, places, _integers(places, device), random, tried, to_device(np.array(tried, np.bool_), device)
        )


@dataclass(frozen=True)
class AdjustedRows:
    """The A sequences whose logits are changed before a token is chosen, the penalized ones first."""

    rows: list[int]
    """[A]: their rows of the step."""
    rows_on_device: torch.Tensor
    """int64 [A]: rows."""
    everything: bool
    """Whether they are all sequences of the step, in order."""
    penalized: PenalizedRows | None
    bias: tuple[torch.Tensor, torch.Tensor] | None
    """int64 places in the flattened logits [A, vocabulary] and float32 what is added there."""
    bans: torch.Tensor | None
    """int64: places in the flattened logits that min_tokens bans."""
    random: RandomRows
    """Those with a temperature, except for those with filters that a grammar bounds."""
    bound: BoundRows | None


class StepPlan:
    """The options of a step's S sequences; valid() says for how long."""

    def __init__(
        self, sequences: list[Sequence], vocabulary: int, device: torch.device, table: PenaltyTable | None
    ) -> None:
        """table: where penalized sequences are counted; needed where there are any."""
        self.sequences = list(sequences)
        self._device = device
        self._vocabulary = vocabulary
        needs = [sequence.pending_needs for sequence in sequences]
        self._too_short = [s for s, own in zip(sequences, needs, strict=True) if own & SamplingNeeds.MIN_TOKENS]
        adjusted = [row for row, own in enumerate(needs) if own & SamplingNeeds.ADJUSTED_LOGITS]
        adjusted.sort(key=lambda row: not needs[row] & SamplingNeeds.PENALTIES)
        raw = [row for row, own in enumerate(needs) if not own & SamplingNeeds.ADJUSTED_LOGITS]
        self.adjusted = self._adjusted(adjusted, table) if adjusted else None
        self.random = RandomRows([sequences[row] for row in raw], vocabulary, raw)
        """The sequences whose tokens are sampled with a temperature from the model's logits as they are."""
        self.scored = self._scored(raw, adjusted)

    def valid(self, sequences: list[Sequence]) -> bool:
        """Whether this is the plan of a step of these sequences now."""
        return self.sequences == sequences and all(sequence.is_too_short for sequence in self._too_short)

    def _adjusted(self, rows: list[int], table: PenaltyTable | None) -> AdjustedRows:
        own, vocabulary, device = [self.sequences[row] for row in rows], self._vocabulary, self._device
        biased = [
            (place * vocabulary + token, value)
            for place, sequence in enumerate(own)
            for token, value in sequence.sampling.logit_bias.items()
        ]
        banned = [
            place * vocabulary + token
            for place, sequence in enumerate(own)
            if sequence.is_too_short
            for token in sequence.stop_ids
            if 0 <= token < vocabulary
        ]
        penalized = [sequence for sequence in own if sequence.needs & SamplingNeeds.PENALTIES]
        bound = [place for place, sequence in enumerate(own) if sequence.constraint is not None]
        free = [place for place, sequence in enumerate(own) if sequence.constraint is None or not is_filtered(sequence)]
        bias = None
        if biased:
            values = np.array([value for _, value in biased], np.float32)
            bias = _integers([place for place, _ in biased], device), to_device(values, device)
        return AdjustedRows(
            rows,
            _integers(rows, device),
            rows == list(range(len(self.sequences))),
            table.rows_of(penalized) if penalized and table is not None else None,
            bias,
            _integers(banned, device) if banned else None,
            RandomRows([own[place] for place in free], vocabulary, free),
            BoundRows.of([own[place] for place in bound], bound, vocabulary, device) if bound else None,
        )

    def _scored(self, raw: list[int], adjusted: list[int]) -> ScoredRows | None:
        asked = [sequence.sampling.logprobs for sequence in self.sequences]
        own_raw = [row for row in raw if asked[row] is not None]
        own_adjusted = [place for place, row in enumerate(adjusted) if asked[row] is not None]
        rows = own_raw + [adjusted[place] for place in own_adjusted]
        if not rows:
            return None
        return ScoredRows(
            rows,
            _integers(rows, self._device),
            _integers(own_raw, self._device),
            _integers(own_adjusted, self._device),
            max(asked[row] or 0 for row in rows),
        )


def _integers(numbers: list[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(numbers, np.int64), device)
