"""What the sequences of a step ask for beside a token, as tensors on the device, kept as long as the same sequences run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from server.engine.runtime.batch import to_device
from server.engine.runtime.sampling.inverse_cdf import is_filtered
from server.engine.runtime.sampling.penalty_table import PenalizedRows, PenaltyTable
from server.engine.runtime.sampling.random_rows import RandomRows
from server.engine.scheduling.sequence import Sequence


@dataclass(frozen=True)
class ScoredRows:
    """Rows of logits whose sequences want log-probabilities."""

    rows: list[int]
    """The sequences' places in the step."""
    most: int
    """How many alternatives the sequence wants that wants the most."""
    at: torch.Tensor | None
    """int64: their rows of the logits; None where they are all rows, in order."""
    rows_on_device: torch.Tensor
    """int64: rows."""


@dataclass(frozen=True)
class AdjustedRows:
    """The A sequences whose logits are changed before a token is chosen, the penalized ones first."""

    rows: list[int]
    """[A]: their places in the step."""
    rows_on_device: torch.Tensor
    """int64 [A]: rows."""
    everything: bool
    """Whether they are all sequences of the step, in order."""
    penalized: PenalizedRows | None
    """The penalized ones, which come first."""
    bias: tuple[torch.Tensor, torch.Tensor] | None
    """int64 places in the flattened logits [A, vocabulary] and float32 what is added there."""
    bans: torch.Tensor | None
    """int64: places in the flattened logits that min_tokens bans."""
    constrained: list[int]
    """[C]: which of the A have a grammar."""
    constrained_on_device: torch.Tensor
    """int64 [C]: constrained."""
    random: RandomRows
    """The sequences whose tokens are sampled with a temperature once their logits are final."""
    tried: RandomRows
    """The sequences whose tokens are sampled without regard to the grammar first, and again where it refuses them."""
    tried_places: torch.Tensor
    """int64: the places of the tried sequences among the A."""
    tried_masks: torch.Tensor
    """int64: the places of the tried sequences among the C."""


class StepPlan:
    """The options of a step's sequences, S of them; valid() says for how long."""

    def __init__(
        self, sequences: list[Sequence], vocabulary: int, device: torch.device, table: PenaltyTable | None
    ) -> None:
        """table: where penalized sequences are counted; needed where there are any."""
        self.sequences = list(sequences)
        self._device = device
        self._vocabulary = vocabulary
        self._waiting = [s for s in sequences if s.is_too_short]
        rows = [row for row, s in enumerate(sequences) if s.is_adjusted]
        rows.sort(key=lambda row: not sequences[row].is_penalized)
        self.adjusted = self._adjusted(rows, table) if rows else None
        changed = set(rows)
        raw = [row for row in range(len(sequences)) if row not in changed]
        self.random = RandomRows([sequences[row] for row in raw], vocabulary, raw)
        """The sequences whose tokens are sampled from the model's logits as they are."""
        self.scored_raw = self._scored(raw, raw, len(sequences))
        """The sequences whose log-probabilities are taken from the model's logits."""
        self.scored_adjusted = self._scored(rows, list(range(len(rows))), len(rows))
        """The sequences whose log-probabilities are taken from the adjusted logits."""

        self.is_random = any(sequence.sampling.temperature > 0 for sequence in sequences)
        """Whether any token is sampled with a temperature."""

    def valid(self, sequences: list[Sequence]) -> bool:
        """Whether this is the plan of a step of these sequences now."""
        return self.sequences == sequences and all(s.is_too_short for s in self._waiting)

    def _adjusted(self, rows: list[int], table: PenaltyTable | None) -> AdjustedRows:
        own, vocabulary = [self.sequences[row] for row in rows], self._vocabulary
        biased = [
            (place, token, value) for place, s in enumerate(own) for token, value in s.sampling.logit_bias.items()
        ]
        banned = [
            place * vocabulary + token
            for place, s in enumerate(own)
            if s.is_too_short
            for token in s.stop_ids
            if 0 <= token < vocabulary
        ]
        constrained = [place for place, s in enumerate(own) if s.constraint is not None]
        tried = [
            place for place in constrained if own[place].sampling.temperature > 0 and not self._filtered(own[place])
        ]
        others = sorted(set(range(len(own))) - set(tried))
        penalized = [s for s in own if s.is_penalized]
        if penalized:
            assert table is not None
        bias = None
        if biased:
            places = self._integers([place * vocabulary + token for place, token, _ in biased])
            bias = places, to_device(np.array([value for *_, value in biased], np.float32), self._device)
        return AdjustedRows(
            rows,
            self._integers(rows),
            rows == list(range(len(self.sequences))),
            table.rows_of(penalized) if penalized and table is not None else None,
            bias,
            self._integers(banned) if banned else None,
            constrained,
            self._integers(constrained),
            RandomRows([own[place] for place in others], vocabulary, others),
            RandomRows([own[place] for place in tried], vocabulary, tried),
            self._integers(tried),
            self._integers([constrained.index(place) for place in tried]),
        )

    def _filtered(self, sequence: Sequence) -> bool:
        return is_filtered(sequence, self._vocabulary)

    def _scored(self, rows: list[int], at: list[int], count: int) -> ScoredRows | None:
        """The rows of those that want log-probabilities; at: where they are in logits of count rows."""
        wanting = [
            (a, row) for a, row in zip(at, rows, strict=True) if self.sequences[row].sampling.logprobs is not None
        ]
        if not wanting:
            return None
        chosen = [row for _, row in wanting]
        most = max(self.sequences[row].sampling.logprobs or 0 for row in chosen)
        own = None if len(wanting) == count else self._integers([a for a, _ in wanting])
        return ScoredRows(chosen, most, own, self._integers(chosen))

    def _integers(self, numbers: list[int]) -> torch.Tensor:
        return to_device(np.array(numbers, np.int64), self._device)
