"""Tokens sampled by inverting the cumulative distribution at one uniform number.

The number depends on the request's seed and the token's position alone, so neither neighbours nor preemption change it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from server.engine.runtime.batch import to_device
from server.engine.runtime.sampling import largest
from server.engine.runtime.trials import failure, side_by_side
from server.engine.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

_MASK64 = (1 << 64) - 1
# Filters look at this many of the most likely tokens first; a full sort of the vocabulary is 20 times slower.
_FIRST_CANDIDATES = 1024
# No sequence is this long, so positions from here on are free: a token that is sampled again takes its number from there.
_RESAMPLING_OFFSET = 1 << 40
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)
"""Logits are divided in float32, on CUDA without subnormal numbers. This gives the largest, as anything below does."""
_TRIALS = 16
_SampleRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def uniforms(seeds: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """uniform_column() of lists."""
    return uniform_column(seed_column(seeds), np.array(positions, np.int64))


def seed_column(seeds: list[int]) -> npt.NDArray[np.uint64]:
    """Seeds as uniform_column() takes them."""
    return np.array([seed & _MASK64 for seed in seeds], np.uint64)


def uniform_column(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each seed and position, which depends on these alone (splitmix64 of their mixture, 53 bits).

    seeds: a seed_column().
    """
    state = seeds * np.uint64(0xD1342543DE82EF95)
    state += positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x2545F4914F6CDD1D)
    for _ in range(2):
        state += np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)) / 2**53


def sample_by_inversion(
    logits: torch.Tensor, sequences: list[Sequence], tokens: torch.Tensor, again: bool = False
) -> torch.Tensor:
    """tokens, int64 [len(sequences)], with a sampled one in each row whose temperature is above 0.

    logits [len(sequences), vocabulary], all on one device; on CUDA the host does not wait for it. again: take other
    uniform numbers than the first time, for tokens that a grammar refused.
    """
    table = sampling_table(sequences, logits.shape[1], again)
    return tokens if table is None else sample_by_table(logits, table, tokens)


def sample_by_table(logits: torch.Tensor, table: npt.NDArray[np.float64], tokens: torch.Tensor) -> torch.Tensor:
    """sample_by_inversion() by the sequences' sampling_table()."""
    if logits.is_cuda and _DeviceSampling.sample_rows is not None:
        tokens = tokens.clone()
        _DeviceSampling.sample_rows(logits, to_device(table, logits.device), tokens)
        return tokens
    filtered = (table[:, 3] < logits.shape[1]) | (table[:, 4] < 1) | (table[:, 5] > 0)
    for chosen, pick in ((table[~filtered], _pick), (table[filtered], _pick_filtered)):
        if len(chosen):
            parameters = _Parameters.of(to_device(chosen, logits.device))
            scores = (logits if len(chosen) == logits.shape[0] else logits[parameters.rows]).float()
            # The maximum is subtracted before the division, so that a tiny temperature does not overflow.
            scores = (scores - scores.amax(dim=-1, keepdim=True)) / parameters.temperatures
            tokens = tokens.index_copy(0, parameters.rows, pick(scores, parameters))
    return tokens


class _DeviceSampling:
    """The kernel that samples on CUDA, once use_device_sampling() has tried it."""

    sample_rows: _SampleRows | None = None


@functools.cache
def use_device_sampling(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    """Sample on a CUDA device in one launch (triton_kernel.py), if it gives what torch's operations give.

    The kernel is tried on, and so compiled for, logits of dtype and of float32 for this vocabulary, and so is the one that
    finds the largest logits (largest.py).
    """

    def sampling() -> None:
        failed = failure(lambda: _load_device_sampling(device, dtype, vocabulary))
        if failed is not None:
            logger.warning("tokens are sampled by torch's operations, more slowly: our kernel fails: %s", failed)

    side_by_side([lambda: largest.use_kernel(device, dtype, vocabulary), sampling], device)


def _load_device_sampling(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    from server.engine.runtime.sampling.triton_kernel import sample_rows

    dtypes = dict.fromkeys((dtype, torch.float32))
    side_by_side([partial(_try_sampling, sample_rows, device, one, vocabulary) for one in dtypes], device)
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


def sampling_table(sequences: list[Sequence], vocabulary: int, again: bool = False) -> npt.NDArray[np.float64] | None:
    """The numbers that decide the sampled tokens: [rows with a temperature above 0, 6], see triton_kernel.sample_rows().

    None where there is no such row. again: as of sample_by_inversion().
    """
    rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
    if not rows:
        return None
    shift = _RESAMPLING_OFFSET if again else 0
    chosen = [sequences[row] for row in rows]
    given = [s.sampling for s in chosen]
    table = np.empty((len(rows), 6), np.float64)
    table[:, 0] = rows
    table[:, 1] = [max(sampling.temperature, _LEAST_TEMPERATURE) for sampling in given]
    table[:, 2] = uniforms([s.seed for s in chosen], [len(s.tokens) + shift for s in chosen])
    table[:, 3] = [sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary for sampling in given]
    table[:, 4] = [sampling.top_p for sampling in given]
    table[:, 5] = [sampling.min_p for sampling in given]
    return table


@dataclass(frozen=True)
class _Parameters:
    """The columns of sampling_table(). All but rows are [rows, 1]."""

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
    # None is kept of logits that are not numbers, which becomes an error of their sequence.
    least = best.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0))
    return least, (best[:, -1:] < least).squeeze(1) | (candidates == vocabulary)
