"""Operations of sampling on rows of logits: by our kernels on CUDA once they have been tried, else by torch's operations."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from server.engine.runtime.batch import to_device
from server.engine.runtime.sampling import torch_ops
from server.engine.runtime.trials import failure, side_by_side

logger = logging.getLogger(__name__)

Tensor = torch.Tensor
_TRIALS = 16


class SamplingOps(Protocol):
    """The operations; torch_ops.py says what they compute."""

    def largest_of_rows(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...

    def penalize_rows(
        self,
        logits: Tensor,
        rows: Tensor,
        penalties: Tensor,
        counts: Tensor,
        counted_rows: Tensor,
        newest: Tensor,
        out: Tensor,
    ) -> None: ...

    def mask_rows(self, logits: Tensor, places: Tensor, masks: Tensor) -> None: ...

    def sample_rows(self, logits: Tensor, table: Tensor, tokens: Tensor) -> None: ...


_kernels: dict[str, SamplingOps] = {}
"""By type of device, the kernels that are used there."""


def ops_on(device: torch.device) -> SamplingOps:
    """The operations for a device."""
    return _kernels.get(device.type, torch_ops)


def largest_of_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See torch_ops.largest_of_rows()."""
    return ops_on(logits.device).largest_of_rows(logits)


def sample_by_table(logits: Tensor, table: npt.NDArray[np.float64] | None, tokens: Tensor) -> Tensor:
    """tokens, int64 [rows], with a sampled one in each row that table names; see torch_ops.sample_rows()."""
    if table is None:
        return tokens
    tokens = tokens.clone()
    ops_on(logits.device).sample_rows(logits, to_device(table, logits.device), tokens)
    return tokens


@functools.cache
def use_kernels(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    """Sample on a CUDA device by our kernels, if they give what torch's operations give.

    They are tried on, and so compiled for, logits of dtype and of float32 for this vocabulary.
    """

    def load() -> None:
        from server.engine.runtime.sampling import triton_ops

        side_by_side(trials(triton_ops, device, dtype, vocabulary), device)
        _kernels[device.type] = triton_ops

    failed = failure(load)
    if failed is not None:
        _kernels.pop(device.type, None)
        logger.warning("tokens are sampled by torch's operations, more slowly: our kernels fail: %s", failed)


def trials(kernels: SamplingOps, device: torch.device, dtype: torch.dtype, vocabulary: int) -> list[Callable[[], None]]:
    """Calls that raise ValueError if kernels do not give what torch's operations give for logits of dtype or float32."""
    calls: list[Callable[[], None]] = [partial(_try_masks, kernels, device, vocabulary)]
    for trial in (_try_largest, _try_sampling, _try_penalties):
        calls += [partial(trial, kernels, device, one, vocabulary) for one in dict.fromkeys((dtype, torch.float32))]
    return calls


def _logits(rows: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)).mul_(3).to(device, dtype)


def _try_largest(kernels: SamplingOps, device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    logits = _logits(4, vocabulary, device, dtype)
    logits[1, [vocabulary // 2, vocabulary - 1]] = 100.0
    logits[2, vocabulary - 1] = torch.nan
    (expected, first), (best, tokens) = (one.largest_of_rows(logits) for one in (torch_ops, kernels))
    if not torch.equal(best.nan_to_num(-1.0), expected.nan_to_num(-1.0)) or not best[2].isnan():
        raise ValueError(f"the largest logits are {best.tolist()} instead of {expected.tolist()}")
    numbers = [0, 1, 3]
    if not torch.equal(tokens[numbers], first[numbers]):
        raise ValueError(f"the largest logits' tokens are {tokens.tolist()} instead of {first.tolist()}")


def _try_sampling(kernels: SamplingOps, device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    logits = _logits(_TRIALS, vocabulary, device, dtype)
    filters: list[list[float]] = [[vocabulary, 1, 0], [20, 0.95, 0], [vocabulary, 0.9, 0], [vocabulary, 1, 0.05]]
    numbers = [[row, 0.8, (row + 0.5) / _TRIALS, *filters[row % 4]] for row in range(_TRIALS)]
    table = torch.tensor(numbers, dtype=torch.float64).to(device)
    expected, found = (torch.full((_TRIALS,), -1, dtype=torch.int64, device=device) for _ in range(2))
    for one, tokens in ((torch_ops, expected), (kernels, found)):
        one.sample_rows(logits, table, tokens)
    # Sums in another order may give the token beside the expected one.
    if int((found == expected).sum()) < _TRIALS - 2:
        raise ValueError(f"sampled tokens are {found.tolist()} instead of {expected.tolist()}")


def _try_penalties(kernels: SamplingOps, device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    logits = _logits(4, vocabulary, device, dtype)
    penalties = torch.tensor([[1.3, 0.0, 0.0], [1.0, 0.7, -0.3], [0.8, 0.5, 0.2]], device=device)
    # Each in memory of its own: the kernels are compiled for addresses that are multiples of 16, as all later ones are.
    rows, counted_rows, newest = (
        torch.tensor(numbers, device=device)
        for numbers in ([3, 0, 1], [2, 4, 0], [vocabulary // 2, -1, vocabulary - 1])
    )
    both = []
    for one in (torch_ops, kernels):
        counts = torch.zeros(5, vocabulary, dtype=torch.int32, device=device)
        counts[:, ::7], counts[:, 3::11] = 1, 5
        out = torch.empty(3, vocabulary, device=device)
        for _ in range(2):
            one.penalize_rows(logits, rows, penalties, counts, counted_rows, newest, out)
        both.append((out, counts))
    if not all(torch.equal(one, other) for one, other in zip(*both, strict=True)):
        raise ValueError("penalized logits differ")


def _try_masks(kernels: SamplingOps, device: torch.device, vocabulary: int) -> None:
    shape, generator = (2, 4 * -(-vocabulary // 32)), torch.Generator().manual_seed(0)
    masks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(device)
    expected = _logits(4, vocabulary, device, torch.float32)
    found, places = expected.clone(), torch.tensor([2, 0], device=device)
    torch_ops.mask_rows(expected, places, masks)
    kernels.mask_rows(found, places, masks)
    if not torch.equal(found, expected):
        raise ValueError("masked logits differ")
