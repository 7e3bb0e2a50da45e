"""Recorded and traced small steps on CPU, if they give the bits that compiled layers and the model's class give."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import torch

from server.engine.runtime.attention.paged_cpu import PagedCpuBackend
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.graphs.recorded import MOST_TOKENS, RecordedLayers
from server.engine.runtime.graphs.recording import RecordingError
from server.engine.runtime.graphs.traced import TracedSteps
from server.engine.runtime.model.decoder import layer_list
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.trial_steps import TrialSteps
from server.engine.runtime.trials import failure

logger = logging.getLogger(__name__)

TRACING_SECONDS = 2.0
"""After this long at a start no further number of tokens is traced: where steps take that long, tracing saves little."""


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
        logger.info("steps of few tokens are not recorded, and take up to half as long again: %s", e)
        return False

    def try_it() -> None:
        for batch, logits in zip(batches, expected, strict=True):
            if not torch.equal(paged.run(batch), logits):
                raise RecordingError(f"a step of {len(batch.ids)} tokens gives other logits")

    wrong = failure(try_it) or recorded.refusal
    if wrong is not None:
        logger.info("steps of few tokens are not recorded, and take up to half as long again: %s", wrong)
        recorded.undo()
        return False
    _trace_with_trials(paged, TracedSteps(paged.model, recorded, backend), num_blocks)
    return True


def _trace_with_trials(paged: PagedModel, traced: TracedSteps, num_blocks: int) -> None:
    """Trace steps of single tokens, as many of each as there is time for; a step whose logits differ by a bit is not.

    Steps of these numbers of tokens are recorded here, too, so that no request has to wait for that.
    """
    end = time.monotonic() + TRACING_SECONDS
    for count in range(1, min(MOST_TOKENS, num_blocks) + 1):
        first, second = _singles(paged, count, 0), _singles(paged, count, 1)

        def try_it(first: Batch = first, second: Batch = second) -> None:
            paged.run_class(first)
            expected = [paged.run_class(batch) for batch in (first, second)]
            traced.trace(first)
            for batch, logits in zip((first, second), expected, strict=True):
                if not torch.equal(traced.run(batch), logits):
                    raise RecordingError(f"a traced step of {len(batch.ids)} tokens gives other logits")

        wrong = failure(try_it)
        if wrong is not None:
            logger.info("steps of %d tokens and more go through the model's class, more slowly: %s", count, wrong)
            traced.forget(count)
            break
        if time.monotonic() > end:
            break
    paged.small_steps = traced


def _singles(paged: PagedModel, count: int, position: int) -> Batch:
    """A step of count sequences' tokens at a position of their first KV block."""
    position = min(position, paged.block_size - 1)
    rows = torch.arange(count)
    sequences = Spans.of([Span(row, position, 1, (row,)) for row in range(count)])
    ids = (rows * 7 + 211 + 96 * position) % paged.vocab_size
    return Batch(ids, rows * 0 + position, rows * paged.block_size + position, rows, sequences, count)


def _batches(paged: PagedModel, num_blocks: int) -> Iterator[Batch]:
    """Steps of one and of two tokens: of each, one that is recorded, and others that are replayed."""
    steps = TrialSteps(paged)
    for count in (1, 2):
        yield steps.first_chunk(count)
        if count <= num_blocks:
            yield _singles(paged, count, 0)
    # A sequence that goes on behind the first chunk of two.
    if paged.block_size > 2:
        rows = torch.arange(1)
        ids = (rows + 307) % paged.vocab_size
        yield Batch(ids, rows + 2, rows + 2, rows, Spans.of([Span(0, 2, 1, (0,))]), 1)
