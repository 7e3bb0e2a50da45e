"""Recorded small steps on CPU, if they give the bits that compiled layers give."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from server.engine.runtime.attention.paged_cpu import PagedCpuBackend
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.graphs.recorded import RecordedLayers
from server.engine.runtime.graphs.recording import RecordingError
from server.engine.runtime.model.decoder import layer_list
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.trial_steps import TrialSteps
from server.engine.runtime.trials import failure

logger = logging.getLogger(__name__)


def record_with_trials(paged: PagedModel, num_blocks: int) -> bool:
    """Record paged's compiled layers on CPU; returns whether they are. They are not where results differ by a bit.

    num_blocks: of the cache. Call in inference mode.
    """
    backend = paged.backend
    if not isinstance(backend, PagedCpuBackend):
        return False
    layers = layer_list(paged.model)
    if layers is None:
        return False
    batches = list(_batches(paged, num_blocks))
    expected = [paged.run(batch) for batch in batches]
    try:
        recorded = RecordedLayers(layers, backend)
    except RecordingError as e:
        logger.debug("small steps are not recorded: %s", e)
        return False

    def try_it() -> None:
        for batch, logits in zip(batches, expected, strict=True):
            if not torch.equal(paged.run(batch), logits):
                raise RecordingError(f"a step of {len(batch.ids)} tokens gives other logits")

    wrong = failure(try_it) or recorded.refusal
    if wrong is not None:
        logger.debug("small steps are not recorded: %s", wrong)
        recorded.undo()
    return wrong is None


def _batches(paged: PagedModel, num_blocks: int) -> Iterator[Batch]:
    """Steps of one and of two tokens: of each, one that is recorded, and others that are replayed."""
    steps = TrialSteps(paged)
    for count in (1, 2):
        yield steps.first_chunk(count)
        rows = torch.arange(count)
        ids = (rows + 211) % paged.vocab_size
        if count <= num_blocks:
            sequences = Spans.of([Span(row, 0, 1, (row,)) for row in range(count)])
            yield Batch(ids, rows * 0, rows * paged.block_size, rows, sequences, count)
    # A sequence that goes on behind the first chunk of two.
    if paged.block_size > 2:
        rows = torch.arange(1)
        ids = (rows + 307) % paged.vocab_size
        yield Batch(ids, rows + 2, rows + 2, rows, Spans.of([Span(0, 2, 1, (0,))]), 1)
