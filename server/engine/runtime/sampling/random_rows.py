"""Rows of logits whose tokens are sampled, and the numbers that decide which tokens.

A token is sampled by inverting the cumulative distribution at one uniform number. That depends on the request's seed and
the token's position alone, so neither neighbours nor preemption change it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from server.engine.scheduling.sequence import Sequence

RESAMPLING_OFFSET = 1 << 40
"""Added to positions for tokens that are sampled again, whose numbers must be others. No sequence is this long."""
_MASK64 = (1 << 64) - 1
_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)
"""Logits are divided in float32, on CUDA without subnormal numbers. This gives the largest, as anything below does."""


class RandomRows:
    """The rows of some sequences whose temperature is above 0. All but the tokens' positions is kept over steps."""

    def __init__(
        self, sequences: list[Sequence], vocabulary: int, rows: list[int] | None = None, shifts: list[int] | None = None
    ) -> None:
        """rows: the sequences' rows of the logits; None: 0, 1, ... shifts: what is added to their positions; None: 0."""
        chosen = [place for place, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
        self._sequences = [sequences[place] for place in chosen]
        self._seeds = _seeds([sequence.seed for sequence in self._sequences])
        self._shifts = np.array([0 if shifts is None else shifts[place] for place in chosen], np.int64)
        numbers = [
            (
                max(asked.temperature, _MIN_TEMPERATURE),
                0.0,
                asked.top_k if 0 < asked.top_k < vocabulary else vocabulary,
                asked.top_p,
                asked.min_p,
            )
            for asked in (sequence.sampling for sequence in self._sequences)
        ]
        self._table = np.empty((len(chosen), 6), np.float64)
        self._table[:, 0] = chosen if rows is None else [rows[place] for place in chosen]
        self._table[:, 1:] = np.array(numbers, np.float64).reshape(-1, 5)

    def table(self, shift: int = 0) -> npt.NDArray[np.float64] | None:
        """The numbers that decide the next tokens, float64 [R, 6], see torch_ops.sample_rows(); None where R is 0.

        shift: what is added to all positions.
        """
        if not self._sequences:
            return None
        table = self._table.copy()
        positions = np.array([sequence.num_tokens for sequence in self._sequences], np.int64)
        table[:, 2] = _uniforms(self._seeds, positions + self._shifts + shift)
        return table


def is_filtered(sequence: Sequence) -> bool:
    """Whether top_k, top_p or min_p cut tokens off."""
    sampling = sequence.sampling
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def uniforms(seeds: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each seed and position, which depends on these alone (splitmix64 of their mixture, 53 bits)."""
    return _uniforms(_seeds(seeds), np.array(positions, np.int64))


def _seeds(seeds: list[int]) -> npt.NDArray[np.uint64]:
    return np.array([seed & _MASK64 for seed in seeds], np.uint64)


def _uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    state = seeds * np.uint64(0xD1342543DE82EF95)
    state += positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x2545F4914F6CDD1D)
    for _ in range(2):
        state += np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)) / 2**53
