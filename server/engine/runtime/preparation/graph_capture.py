"""CUDA graphs of a model: decode steps, and mixed steps if they compute what the layers compute without graphs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from server.checkpoint.base import Progress
from server.config import EngineConfig
from server.engine.runtime.attention.graph_backend import DecodeForm, GraphBackend
from server.engine.runtime.batch import Batch
from server.engine.runtime.exchange import agreed, least
from server.engine.runtime.graphs.graph_set import (
    DRAFT_SIZES,
    GraphSet,
    Tokens,
    chunk_sizes,
    decode_sizes,
    long_chunk_forms,
)
from server.engine.runtime.graphs.invariant import INVARIANT_ROWS
from server.engine.runtime.layers.decoder import DecoderLayer
from server.engine.runtime.limits import ModelLimits, token_budget
from server.engine.runtime.memory import reserve
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.trial_steps import TrialSteps, mixed_trial_steps
from server.engine.runtime.states.kinds import LONG_CHUNK
from server.engine.runtime.trials import failure

logger = logging.getLogger(__name__)

_MIXTURE_RESERVE = 1 << 30
"""Bytes of the reserve from which on mixtures have their larger graphs, which take up to 0.5 GiB of it (Qwen3.6-35B-A3B)."""


def capture_decode(
    paged: PagedModel,
    backend: GraphBackend,
    limits: ModelLimits,
    config: EngineConfig,
    progress: Progress,
    layers: Sequence[DecoderLayer],
) -> GraphSet:
    """Capture decode steps of up to the configured number of sequences. Call in inference mode.

    layers: the model's written layers; empty: it has none.
    """
    states = None if paged.states is None else paged.states.pool
    own = paged.model, backend, paged.block_size, paged.clock
    graphs = GraphSet(*own, adapter_slots=paged.adapter_slots, states=states)
    sizes = [INVARIANT_ROWS] if config.batch_invariant else decode_sizes(limits.max_num_seqs)
    # The tables have a row for each running sequence, which may be more than the graph of batch_invariant has tokens.
    room = max(limits.max_num_seqs, *sizes, *verify_sizes(config))
    forms = decode_forms(layers, sizes, paged.dtype)
    backend.set_up_graphs(limits.max_model_len, room, not config.batch_invariant, forms)
    graphs.capture(sizes, progress)
    return graphs


def decode_forms(layers: Sequence[DecoderLayer], sizes: Sequence[int], dtype: torch.dtype) -> set[DecodeForm]:
    """Forms that written layers ask of the launch that attends in decode graphs of these sizes."""
    attending = [attention for layer in layers if (attention := layer.attention) is not None]
    return {attention.form(size, dtype) for attention in attending for size in sizes}


def verify_sizes(config: EngineConfig) -> list[int]:
    """Tokens of the steps with draft tokens that get graphs; with batch_invariant these go through its one decode graph."""
    return [] if config.speculation == "off" or config.batch_invariant else list(DRAFT_SIZES)


def capture_verify(
    paged: PagedModel,
    backend: GraphBackend,
    limits: ModelLimits,
    sizes: Sequence[int],
    decode: GraphSet,
    progress: Progress,
) -> GraphSet | None:
    """Capture steps with draft tokens of these sizes, in tokens; None, with a warning, if that fails or logits differ.

    Call in inference mode.
    """
    own, pool = (paged.model, backend, paged.block_size, paged.clock), decode.pool
    graphs = GraphSet(*own, Tokens.DRAFTED, pool=pool, adapter_slots=paged.adapter_slots, waited_for=True)
    steps = TrialSteps(paged)
    chunks = (steps.first_chunk(size) for size in sizes if size <= limits.max_model_len)
    trials = itertools.chain(chunks, mixed_trial_steps(steps.first_chunk, paged.block_size, limits))
    every_row = (replace(chunk, sampled_rows=torch.arange(chunk.num_tokens)) for chunk in trials)
    return _captured(graphs, list(sizes), every_row, paged, progress)


def capture_mixed(
    paged: PagedModel,
    backend: GraphBackend,
    limits: ModelLimits,
    config: EngineConfig,
    decode: GraphSet,
    progress: Progress,
) -> GraphSet | None:
    """Capture mixed steps; None, with a warning, if that fails or logits differ."""
    sequences, budget = limits.max_num_seqs, token_budget(config, paged.device)
    own = paged.model, backend, paged.block_size, paged.clock
    states = None if paged.states is None else paged.states.pool
    graphs = GraphSet(*own, Tokens.CHUNKS, pool=decode.pool, max_num_seqs=sequences, states=states)
    largest = max(budget, sequences)
    sizes = chunk_sizes(largest)
    if states is None:
        trials = mixed_trial_steps(TrialSteps(paged).first_chunk, paged.block_size, limits)
        return _captured(graphs, sizes, trials, paged, progress)

    steps = TrialSteps(paged)
    has_room = least(reserve(paged.device, torch.cuda.mem_get_info(paged.device)[1])) >= _MIXTURE_RESERVE

    def attempt() -> None:
        # Draft tokens are chunks, too: layers with states take a sequence's tokens one after another.
        forms = long_chunk_forms(largest, sequences, steps.is_mixture and has_room) if states.captures_long else ()
        graphs.capture({*sizes, *verify_sizes(config)}, progress, forms)
        # A step over states is computed once only, so those of the other trials cannot follow one another.
        _compare_continued(steps, paged, graphs, limits)

    return _kept(graphs, attempt)


def _captured(
    graphs: GraphSet, sizes: list[int], trials: Iterable[Batch], paged: PagedModel, progress: Progress
) -> GraphSet | None:
    """Capture these sizes and compare those of trials that fit with steps without graphs."""
    steps = TrialSteps(paged)

    def attempt() -> None:
        graphs.capture(sizes, progress)
        for batch in trials:
            if graphs.fits(batch):
                # The graph first, so that the other run's keys and values cannot stand in for its own.
                found = graphs.run(batch).logits.float()
                wrong = steps.difference(found, paged.run(batch), batch.num_tokens)
                if wrong is not None:
                    raise ValueError(f"logits {wrong}")

    return _kept(graphs, attempt)


def _kept(graphs: GraphSet, attempt: Callable[[], None]) -> GraphSet | None:
    """graphs if the attempt to capture and compare them succeeds; None, with a warning, if it fails on a rank."""
    failed = failure(attempt)
    if failed is not None:
        logger.warning("%s run without CUDA graphs, more slowly: %s", graphs.tokens.value, failed)
    return graphs if agreed(failed is None) else None


def _compare_continued(steps: TrialSteps, paged: PagedModel, graphs: GraphSet, limits: ModelLimits) -> None:
    """Compare a prompt in two chunks by graphs with the same in one without. Raises ValueError."""
    for count in (graphs.sizes[0], 17, LONG_CHUNK + 50):
        whole = count + 9
        parts = [replace(part, sampled_rows=part.sampled_rows[-1:]) for part in steps.in_chunks(count, whole)]
        room = min(limits.max_model_len, limits.num_blocks * paged.block_size)
        if whole <= room and all(map(graphs.fits, parts)):
            expected = steps.run(whole)[-1:]
            found = [graphs.run(part).logits.float() for part in parts][-1]
            wrong = steps.difference(found, expected, whole)
            if wrong is not None:
                raise ValueError(f"logits {wrong}")
