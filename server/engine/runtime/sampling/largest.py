"""The largest logit of each row and its token, by a kernel of our own where it has been tried."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from server.engine.runtime.trials import failure

logger = logging.getLogger(__name__)

_TRIAL_ROWS = 4


class _Kernel:
    """The kernel, once use_kernel() has tried it."""

    largest_of_rows: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None


def largest_of_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows], the largest logit of each row, NaN where the row has one; int64 [rows], the first token that has it.

    logits [rows, vocabulary]. Vocabularies are below 2**24, up to which float32 has all whole numbers.
    """
    if logits.is_cuda and _Kernel.largest_of_rows is not None and logits.stride(1) == 1:
        return _Kernel.largest_of_rows(logits)
    best, tokens = logits.float().max(dim=-1)
    return best, tokens


def use_kernel(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    """Find them on a CUDA device in one launch (largest_kernel.py), if it gives what torch's operations give.

    The kernel is tried on, and so compiled for, logits of dtype and of float32 for this vocabulary.
    """
    failed = failure(lambda: _load(device, dtype, vocabulary))
    if failed is not None:
        _Kernel.largest_of_rows = None
        logger.warning("torch's operations find the likeliest tokens, more slowly: our kernel fails: %s", failed)


def _load(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    from server.engine.runtime.sampling.largest_kernel import largest_of_rows as by_kernel

    for logits_dtype in dict.fromkeys((dtype, torch.float32)):
        _try(by_kernel, device, logits_dtype, vocabulary)
    _Kernel.largest_of_rows = by_kernel


def _try(
    by_kernel: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    vocabulary: int,
) -> None:
    """Compare what the kernel finds in some rows with torch's maximum. Raises ValueError."""
    logits = torch.randn(_TRIAL_ROWS, vocabulary, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    logits[1, [vocabulary // 2, vocabulary - 1]] = 100.0
    logits[2, vocabulary - 1] = torch.nan
    largest, tokens = logits.float().max(dim=-1)
    best, found = by_kernel(logits)
    is_number = [0, 1, 3]
    if not torch.equal(best[is_number], largest[is_number]) or not best[2].isnan():
        raise ValueError(f"it gives logits {best.tolist()} instead of {largest.tolist()}")
    if not torch.equal(found[is_number], tokens[is_number]):
        raise ValueError(f"it gives tokens {found.tolist()} instead of {tokens.tolist()}")
