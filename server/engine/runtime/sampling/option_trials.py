"""The kernels for options, compared with torch's operations at the start, which also compiles them."""

from __future__ import annotations

import functools
import logging

import torch

from server.engine.runtime.sampling.device_options import DeviceOptions
from server.engine.runtime.sampling.grammar_masks import mask_with_torch
from server.engine.runtime.sampling.penalty_table import PenaltyTable
from server.engine.runtime.trials import failure
from server.engine.scheduling.sequence import Sequence
from server.types import GenerateRequest, SamplingParams

logger = logging.getLogger(__name__)

_ROWS = 4


@functools.cache
def use_device_options(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    """Penalize and mask on a CUDA device in one launch each (triton_options.py), if that gives exactly what torch gives.

    The kernels are tried on, and so compiled for, logits of dtype and of float32 for this vocabulary.
    """
    failed = failure(lambda: _load(device, dtype, vocabulary))
    if failed is not None:
        DeviceOptions.penalize_rows = DeviceOptions.mask_rows = None
        logger.warning("penalties and grammars use torch's operations, more slowly: our kernels fail: %s", failed)


def _load(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    from server.engine.runtime.sampling import triton_options

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_ROWS, vocabulary, generator=generator).mul_(3).to(device, dtype)
    masks = torch.randint(0, 256, (2, 4 * -(-vocabulary // 32)), generator=generator, dtype=torch.uint8).to(device)
    places = torch.tensor([2, 0], device=device)
    found = logits.float()
    expected = found.clone()
    mask_with_torch(expected, places, masks)
    triton_options.mask_rows(found, places, masks)
    if not torch.equal(found, expected):
        raise ValueError("masked logits differ")
    for given in (logits, logits.float()):
        plain = _penalized(given)
        DeviceOptions.penalize_rows = triton_options.penalize_rows
        fused = _penalized(given)
        DeviceOptions.penalize_rows = None
        if not torch.equal(plain, fused):
            raise ValueError("penalized logits differ")
    DeviceOptions.penalize_rows, DeviceOptions.mask_rows = triton_options.penalize_rows, triton_options.mask_rows


def _penalized(logits: torch.Tensor) -> torch.Tensor:
    """Logits of some sequences, whose newest token is on the device, after two steps."""
    device, vocabulary = logits.device, logits.shape[1]
    options = SamplingParams(
        max_tokens=9, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=-0.3
    )
    sequences = [
        Sequence(GenerateRequest(str(i), [token % vocabulary for token in range(i, 40 * i + 9, i + 1)], options), i)
        for i in range(3)
    ]
    table = PenaltyTable(vocabulary, device)
    rows = torch.tensor([3, 0, 1], device=device)
    penalized = table.rows_of(sequences)
    found = []
    for _ in range(3):
        newest = torch.arange(_ROWS, device=device)
        found.append(table.penalize(logits, rows, penalized, newest))
        for sequence, token in zip(sequences, (3, 0, 1), strict=True):
            sequence.tokens.append(token)
    return torch.stack(found)
