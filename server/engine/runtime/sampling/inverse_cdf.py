"""Tokens sampled by inverting the cumulative distribution at one uniform number.

The number depends on the request's seed and the token's position alone, so neither neighbours nor preemption change it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from server.engine.runtime.trials import failure
from server.engine.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

_MASK64 = (1 << 64) - 1
# Filters look at this many of the most likely tokens first; a full sort of the vocabulary is 20 times slower.
_FIRST_CANDIDATES = 1024
# No sequence is as long, so positions from here on are free: a token that is sampled again takes its number from there.
_RESAMPLING_OFFSET = 1 << 40
_TRIALS = 16
_SampleRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position only (splitmix64 of their mixture, 53 bits)."""
    state = (seed * 0xD1342543DE82EF95 + position * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & _MASK64
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) / 2**53


def uniforms(seeds: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """uniform() of each seed and position."""
    return _uniforms(_mixed(seeds), np.array(positions, np.int64))


def _mixed(seeds: list[int]) -> npt.NDArray[np.uint64]:
    """What seeds add to the states of their numbers."""
    mixed = np.array([seed & _MASK64 for seed in seeds], np.uint64) * np.uint64(0xD1342543DE82EF95)
    return mixed + np.uint64(0x2545F4914F6CDD1D)


def _uniforms(mixed: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """uniform() of _mixed() seeds and their positions."""
    state = mixed + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for _ in range(2):
        state += np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)) / 2**53


class RandomRows:
    """Rows of logits whose tokens are sampled, with all that decides about that but the tokens' positions."""

    def __init__(self, sequences: list[Sequence], vocabulary: int, rows: list[int] | None = None) -> None:
        """rows: the sequences' rows of the logits; None: 0, 1, ... Only those of a temperature above 0 are kept."""
        pairs = zip(range(len(sequences)) if rows is None else rows, sequences, strict=True)
        random = [(row, sequence) for row, sequence in pairs if sequence.sampling.temperature > 0]
        self.rows: npt.NDArray[np.int64] = np.array([row for row, _ in random], np.int64)
        """int64 [R]: their rows of the logits."""
        chosen = [sequence for _, sequence in random]
        given = [sequence.sampling for sequence in chosen]
        self._mixed = _mixed([sequence.seed for sequence in chosen])
        self._columns = np.zeros((len(random), 6), np.float64)
        self._columns[:, 0] = self.rows
        self._columns[:, 1] = [sampling.temperature for sampling in given]
        self._columns[:, 3] = [sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary for sampling in given]
        self._columns[:, 4] = [sampling.top_p for sampling in given]
        self._columns[:, 5] = [sampling.min_p for sampling in given]
        self._sequences = chosen
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return len(self.rows)

    def sample(
        self, logits: torch.Tensor, lengths: npt.NDArray[np.int64], tokens: torch.Tensor, again: bool = False
    ) -> torch.Tensor:
        """tokens, int64 [rows], with a sampled one in each of these rows; logits [rows, vocabulary], on the same device.

        lengths: int64 [rows], tokens of each row's sequence so far. On CUDA the host does not wait for the device. again:
        take other uniform numbers than the first time, for tokens that a grammar refused.
        """
        if not len(self):
            return tokens
        table = self._columns.copy()
        table[:, 2] = _uniforms(self._mixed, lengths[self.rows] + (_RESAMPLING_OFFSET if again else 0))
        if logits.is_cuda and _DeviceSampling.sample_rows is not None:
            tokens = tokens.clone()
            _DeviceSampling.sample_rows(logits, _on(logits.device, table), tokens)
            return tokens
        filtered = np.array([is_filtered(sequence, self._vocabulary) for sequence in self._sequences], bool)
        for chosen, pick in ((~filtered, _pick), (filtered, _pick_filtered)):
            if chosen.any():
                parameters = _Parameters.of(_on(logits.device, table[chosen]))
                scores = (logits if chosen.sum() == logits.shape[0] else logits[parameters.rows]).float()
                # The maximum is subtracted before the division, so that a tiny temperature does not overflow.
                scores = (scores - scores.amax(dim=-1, keepdim=True)) / parameters.temperatures
                tokens = tokens.index_copy(0, parameters.rows, pick(scores, parameters))
        return tokens


def sample_by_inversion(
    logits: torch.Tensor, sequences: list[Sequence], tokens: torch.Tensor, again: bool = False
) -> torch.Tensor:
    """tokens, int64 [len(sequences)], with a sampled one in each row whose temperature is above 0: RandomRows.sample().

    logits [len(sequences), vocabulary].
    """
    if all(sequence.sampling.temperature == 0 for sequence in sequences):
        return tokens
    lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
    return RandomRows(sequences, logits.shape[1]).sample(logits, lengths, tokens, again)


def _on(device: torch.device, table: npt.NDArray[np.float64]) -> torch.Tensor:
    """A table of parameters on a device: one transfer from pinned memory, so that the host does not wait for it."""
    tensor = torch.from_numpy(table)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class _DeviceSampling:
    """The kernel that samples on CUDA, once use_device_sampling() has tried it."""

    sample_rows: _SampleRows | None = None


@functools.cache
def use_device_sampling(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    """Sample on a CUDA device in one launch (triton_kernel.py), if it gives what torch's operations give.

    The kernel is tried on, and so compiled for, logits of dtype and of float32 for this vocabulary.
    """
    failed = failure(lambda: _load_device_sampling(device, dtype, vocabulary))
    if failed is not None:
        logger.warning("tokens are sampled by torch's operations, more slowly: our kernel fails: %s", failed)


def _load_device_sampling(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    from server.engine.runtime.sampling.triton_kernel import sample_rows

    for logits_dtype in dict.fromkeys((dtype, torch.float32)):
        _try_sampling(sample_rows, device, logits_dtype, vocabulary)
    _DeviceSampling.sample_rows = sample_rows


def _try_sampling(sample_rows: _SampleRows, device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    """Compare some sampled tokens with those of torch's operations. Raises ValueError."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_TRIALS, vocabulary, generator=generator).mul_(3).to(device, dtype)
    all_tokens = float(vocabulary)
    filters = torch.tensor(
        [[all_tokens, 1, 0], [20, 0.95, 0], [all_tokens, 0.9, 0], [all_tokens, 1, 0.05]], dtype=torch.float64
    )
    rows = torch.arange(_TRIALS, dtype=torch.float64).unsqueeze(1)
    temperatures, uniforms = torch.full_like(rows, 0.8), torch.rand(_TRIALS, 1, generator=generator).double()
    table = torch.cat([rows, temperatures, uniforms, filters.repeat(_TRIALS // 4, 1)], dim=1).to(device)
    parameters = _Parameters.of(table)
    scores = logits.float()
    expected = _pick_filtered((scores - scores.amax(dim=-1, keepdim=True)) / parameters.temperatures, parameters)
    found = torch.full_like(expected, -1)
    sample_rows(logits, table, found)
    # Sums in another order may give the token beside the expected one.
    if int((found == expected).sum()) < _TRIALS - 2:
        raise ValueError(f"it gives {found.tolist()} instead of {expected.tolist()}")


@dataclass(frozen=True)
class _Parameters:
    """The columns of a table of parameters, see triton_kernel.sample_rows(). All but rows are [rows, 1]."""

    rows: torch.Tensor
    temperatures: torch.Tensor
    uniforms: torch.Tensor
    """float64."""
    top_k: torch.Tensor
    """The vocabulary's size where the filter is off."""
    top_p: torch.Tensor
    min_p: torch.Tensor

    def only(self, mask: torch.Tensor) -> _Parameters:
        """The parameters of the rows that mask, bool [rows], picks."""
        return _Parameters(*(getattr(self, f.name)[mask] for f in fields(self)))

    @classmethod
    def of(cls, table: torch.Tensor) -> _Parameters:
        rows, temperatures, uniforms, top_k, top_p, min_p = table.unsqueeze(2).unbind(1)
        return cls(
            rows.squeeze(1).long(), temperatures.float(), uniforms, top_k.long(), top_p.float(), min_p.float()
        )  # fmt: skip


def is_filtered(sequence: Sequence, vocabulary: int) -> bool:
    """Whether top_k, top_p or min_p cuts tokens off."""
    sampling = sequence.sampling
    return 0 < sampling.top_k < vocabulary or sampling.top_p < 1 or sampling.min_p > 0


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index, in each row of weights, where the running sum passes uniform * total."""
    # float64: over a large vocabulary a float32 running sum loses the unlikely tokens.
    running = weights.double().cumsum(-1)
    index = torch.searchsorted(running, uniforms * running[:, -1:], right=True)
    return index.squeeze(1).clamp_(max=weights.shape[1] - 1)


def _pick(scores: torch.Tensor, parameters: _Parameters) -> torch.Tensor:
    return _invert(scores.softmax(-1), parameters.uniforms)


def _pick_filtered(scores: torch.Tensor, parameters: _Parameters) -> torch.Tensor:
    vocabulary = scores.shape[1]
    total = scores.exp().sum(-1, keepdim=True)
    if scores.is_cuda:
        # Asking whether the first candidates are enough would make the host wait for the device.
        return _pick_from_all(scores, total, parameters)
    best, ids = scores.topk(min(_FIRST_CANDIDATES, vocabulary), dim=-1)
    least, decided = _least_kept(best, vocabulary, total, parameters)
    # The running sum goes in the order of token ids, as it does over the whole vocabulary.
    ids, order = ids.sort(dim=-1)
    best = best.gather(1, order)
    places = _invert(best.exp().masked_fill(best < least, 0.0), parameters.uniforms)
    tokens = ids.gather(1, places.unsqueeze(1)).squeeze(1)
    if not decided.all():
        tokens[~decided] = _pick_from_all(scores[~decided], total[~decided], parameters.only(~decided))
    return tokens


def _pick_from_all(scores: torch.Tensor, total: torch.Tensor, parameters: _Parameters) -> torch.Tensor:
    least, _ = _least_kept(scores.sort(dim=-1, descending=True)[0], scores.shape[1], total, parameters)
    return _invert(scores.exp().masked_fill(scores < least, 0.0), parameters.uniforms)


def _least_kept(
    best: torch.Tensor, vocabulary: int, total: torch.Tensor, parameters: _Parameters
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest score [rows, 1] that passes the filters, and whether all tokens that do are among the best.

    best: the highest scores, descending. Tokens with the same score pass together.
    """
    candidates = best.shape[1]
    place = torch.arange(candidates, device=best.device)
    weights = best.exp().masked_fill(place >= parameters.top_k, 0.0)
    limited = parameters.top_k < vocabulary
    # top_p is a share of the mass that top_k leaves, which is known without a sort when top_k is off.
    mass = torch.where(limited, weights.sum(-1, keepdim=True), total)
    before = weights.double().cumsum(-1) - weights
    kept = (before < parameters.top_p * mass) | (place == 0)
    kept &= (weights >= parameters.min_p * weights[:, :1]) & (place < parameters.top_k)
    least = best.gather(1, kept.sum(-1, keepdim=True) - 1)
    return least, (best[:, -1:] < least).squeeze(1) | (candidates == vocabulary)
