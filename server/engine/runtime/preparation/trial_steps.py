"""Steps on which something faster is tried before it is used: their batches, and how far logits may differ."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from server.checkpoint.experts.module import NF4Experts
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.limits import ModelLimits
from server.engine.runtime.model.decoder import decoder_layers
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.trials import relative_error

TRIAL_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""The largest error of logits that is tolerated, relative to the norm of all of them, by dtype.

What is tried may differ by rounding only. A single token's logits can be so ill conditioned that rounding alone moves
them by a thousandth.
"""
_ANOTHER_EXPERT = 4
"""By how much more the median token's logits may differ in a model whose routers may choose another expert by rounding.

Random weights of 40 layers with 256 experts are off by 0.34 in bfloat16, though each layer by itself differs by rounding
only; logits of wrong text differ by 0.5 to 1.4.
"""
_SINGLES = 7
"""Sequences whose first token is tried in such a model."""
_TOLERATED_LAYERS = 32
"""The roundings of so many layers are tolerated; those of more layers add up like random numbers.

Random weights of 80 layers are off by 0.11 in bfloat16 on two GPUs.
"""


def growth(paged: PagedModel) -> float:
    """By how much more the logits of a deep model may differ by rounding."""
    return math.sqrt(max(1.0, len(decoder_layers(paged.model)) / _TOLERATED_LAYERS))


class TrialSteps:
    """Runs first chunks of a sequence through a model."""

    def __init__(self, paged: PagedModel) -> None:
        self._paged = paged
        self.is_mixture = any(isinstance(module, NF4Experts) for module in paged.model.modules())
        """Whether the model is a mixture of experts."""
        self._tolerance = TRIAL_TOLERANCES[paged.dtype] * growth(paged) * (_ANOTHER_EXPERT if self.is_mixture else 1)
        self.largest_error = 0.0
        """The largest relative error that difference() has seen."""

    def several(self, count: int) -> torch.Tensor:
        """Logits as run() gives them; of _SINGLES sequences one after the other, if it is one token of a mixture's."""
        return torch.cat([self.run(count, first) for first in range(_SINGLES if self.is_mixture and count == 1 else 1)])

    def run(self, count: int, first: int = 0) -> torch.Tensor:
        """Logits [count, vocabulary] of a first chunk of count tokens; another sequence for each number `first`."""
        batch = self.first_chunk(count)
        return self._paged.run(replace(batch, ids=(batch.ids + first) % self._paged.vocab_size) if first else batch)

    def first_chunk(self, count: int) -> Batch:
        """A step of one sequence's first count tokens, in the cache's first blocks, all of whose logits are wanted.

        It is in host memory, as the steps of requests are.
        """
        return self._chunk(0, count)

    def in_chunks(self, *ends: int) -> list[Batch]:
        """Steps of the chunks of the same sequence that end there."""
        return [self._chunk(start, end) for start, end in itertools.pairwise((0, *ends))]

    def singles(self, count: int, place: int) -> Batch:
        """A step of the token at `place` of each of `count` sequences, which share the cache's first blocks."""
        rows, places = torch.arange(count), torch.full((count,), place)
        blocks = range(place // self._paged.block_size + 1)
        spans = Spans.of(Span(row, place, 1, blocks) for row in range(count))
        return Batch((places + 101) % self._paged.vocab_size, places, places, rows, spans, count)

    def _chunk(self, start: int, end: int) -> Batch:
        places = torch.arange(start, end)
        # The first ids are often padding, whose embedding is zero.
        ids = (places + 101) % self._paged.vocab_size
        spans = Spans.of([Span(0, start, end - start, range(-(-end // self._paged.block_size)))])
        return Batch(ids, places, places, places - start, spans, int(end - start == 1))

    def difference(self, logits: torch.Tensor, expected: torch.Tensor, count: int) -> str | None:
        """Say how the logits of steps of count tokens differ from the expected ones by more than rounding."""
        if self.is_mixture:
            error = statistics.median_high(map(relative_error, logits, expected))
        else:
            error = relative_error(logits, expected)
        self.largest_error = max(self.largest_error, error)
        return None if error < self._tolerance else f"are off by {error:.1e} with {count} tokens"


def mixed_trial_steps(first_chunk: Callable[[int], Batch], block_size: int, limits: ModelLimits) -> Iterator[Batch]:
    """Mixed steps, to be run in turn: first chunks, then a decoding sequence beside a chunk of another one.

    first_chunk(n): a step of a sequence's first n tokens, in the cache's first blocks.
    """
    for count in (7, block_size + 1):
        batch = first_chunk(count)
        yield replace(batch, sampled_rows=batch.sampled_rows[-1:])
    count = block_size // 2
    if not count or limits.num_blocks < 3 or limits.max_model_len < 2 * block_size:
        return
    # The sequence of the last chunk goes on; the other one shares its first block and has its own tokens in a third.
    positions = torch.arange(block_size, block_size + 1 + count)
    positions[0] += 1
    positions[1:] -= 1
    slots = torch.cat((positions[:1], positions[1:] + block_size))
    spans = Spans.of([Span(0, block_size + 1, 1, (0, 1)), Span(1, block_size, count, (0, 2))])
    ids = (positions + 211) % limits.vocab_size
    yield Batch(ids, positions, slots, positions.new_tensor([0, count]), spans, 1)
