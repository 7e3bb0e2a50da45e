"""Whether a draft model's steps can be laid out for tokens that only the device knows; tried at the start."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from server.engine.runtime.batch import Batch, batch_of
from server.engine.runtime.graphs.decode import DecodeGraphs
from server.engine.runtime.graphs.verify import VerifyGraphs
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.trial_steps import TrialSteps
from server.engine.runtime.step_input import StepInput
from server.engine.runtime.trials import failure

logger = logging.getLogger(__name__)

_TOKENS, _FURTHER = 6, 2


def can_go_ahead(paged: PagedModel, decode: DecodeGraphs, verify: VerifyGraphs) -> bool:
    """Whether graphs that are laid out for earlier tokens and then moved on give the logits of later ones.

    Where not, the log says why. Call in inference mode.
    """
    failed = failure(lambda: _try(paged, decode, verify))
    if failed is not None:
        logger.warning("a draft model guesses when the model's tokens are known, more slowly: %s", failed)
    return failed is None


def _try(paged: PagedModel, decode: DecodeGraphs, verify: VerifyGraphs) -> None:
    from server.engine.runtime.attention.kernels.accept_kernel import accept

    device, steps = paged.device, TrialSteps(paged)

    def on_device(numbers: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(numbers, device=device)

    ids, sampled = on_device([4, 7, 8, 9, 3, 5]), on_device([7, 8, 1, 2, 6, 5])
    found = [own.tolist() for own in accept(ids, sampled, on_device([[0, 4], [3, 1]]), 3)]
    if found != [[2, 2, 0, 0], [8, 1, 3, 6]]:
        raise ValueError(f"right guesses are not found: {found}")
    chunk = steps.first_chunk(_TOKENS)
    expected = verify.run(chunk).clone()
    for graphs, rows in ((verify, [2, 3]), (decode, [3])):
        later = [row + _FURTHER for row in rows]
        shifts = torch.full((len(rows),), _FURTHER, device=device)
        launched = graphs.launch_shifted(_singles(chunk, rows, paged.block_size), chunk.ids[later].to(device), shifts)
        if launched is None:
            raise ValueError("the attention does not move steps on")
        wrong = steps.difference(launched[0].float(), expected[later].float(), len(rows))
        if wrong is not None:
            raise ValueError(f"logits {wrong}")
    if decode.launch_next(ids[:1], None) is None:
        raise ValueError("the attention does not move a step on that was moved on")


def _singles(chunk: Batch, rows: list[int], block_size: int) -> Batch:
    """Some tokens of a sequence's first chunk, each by itself."""
    starts, ids, row = np.array(rows, np.int64), chunk.ids[rows].tolist(), chunk.spans.rows[[0] * len(rows)]
    wanted, ones = np.arange(len(rows)), np.ones(len(rows), np.int64)
    given = StepInput(chunk.spans.tables, row, starts, ones, ids, wanted, [None] * len(rows))
    return batch_of(given, block_size)
