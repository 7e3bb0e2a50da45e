"""Rows of logits whose tokens are sampled. What decides which tokens, except their positions, is kept over steps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from server.engine.runtime.sampling.inverse_cdf import (
    _RESAMPLING_OFFSET,
    sample_by_table,
    sampling_table,
    seed_column,
    uniform_column,
)
from server.engine.scheduling.sequence import Sequence


class RandomRows:
    """The rows of some sequences whose temperature is above 0."""

    def __init__(self, sequences: list[Sequence], vocabulary: int, rows: list[int] | None = None) -> None:
        """rows: the sequences' rows of the logits; None: 0, 1, ..."""
        places = [place for place, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
        table = sampling_table(sequences, vocabulary)
        if table is not None and rows is not None:
            table[:, 0] = [rows[place] for place in places]
        self._table = np.zeros((0, 6)) if table is None else table
        self._seeds = seed_column([sequences[place].seed for place in places])
        self.rows: npt.NDArray[np.int64] = self._table[:, 0].astype(np.int64)
        """int64 [R]: their rows of the logits."""

    def __len__(self) -> int:
        return len(self.rows)

    def sample(
        self, logits: torch.Tensor, lengths: npt.NDArray[np.int64], tokens: torch.Tensor, again: bool = False
    ) -> torch.Tensor:
        """tokens, int64 [rows], with a sampled one in each of these rows, as sample_by_inversion() samples it.

        logits [rows, vocabulary], on the same device; lengths: int64 [rows], tokens of each row's sequence so far. again:
        take other uniform numbers than the first time, for tokens that a grammar refused.
        """
        if not len(self):
            return tokens
        table = self._table.copy()
        table[:, 2] = uniform_column(self._seeds, lengths[self.rows] + again * _RESAMPLING_OFFSET)
        return sample_by_table(logits, table, tokens)
