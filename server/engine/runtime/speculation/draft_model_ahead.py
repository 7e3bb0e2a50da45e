"""Guesses behind a step whose tokens the host does not know: it launches them, and the device goes on without a pause.

A step with guesses runs, and how many of them are right decides where each sequence goes on. So the host lays out the draft
model's steps as if none were right. One launch on the device finds how many are, and another one moves positions, cache
slots and keys on by as many. The first step computes two tokens of each sequence: the newest one, and the one in front of
it, which the draft model has not computed where all guesses were right.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from server.engine.runtime.batch import Batch, batch_of, to_device
from server.engine.runtime.graphs.async_step import AsyncStep
from server.engine.runtime.graphs.decode import DecodeGraphs
from server.engine.runtime.graphs.verify import VerifyGraphs
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.sampling.inverse_cdf import (
    sample_by_table,
    samples_by_kernel,
    sampling_table,
    uniforms,
)
from server.engine.runtime.speculation.launched_guesses import LaunchedGuesses
from server.engine.runtime.step_input import StepInput
from server.engine.scheduling.sequence import PLACEHOLDER, Sequence


class _Tables:
    """sampling_table() of each place of guesses, on the device, where their positions are known there only."""

    def __init__(self, sequences: list[Sequence], vocabulary: int, reach: int, shifts: torch.Tensor) -> None:
        """sequences: with a placeholder for the step's first token. reach: more than any shift and any place together.

        shifts int64 [sequences]: how many tokens each sequence is longer than on the host.
        """
        base = sampling_table(sequences, vocabulary)
        assert base is not None
        self._rows = base[:, 0].astype(np.int64)
        sampled = [sequences[row] for row in self._rows.tolist()]
        seeds = [own.seed for own in sampled for _ in range(reach)]
        positions = [len(own.tokens) + further for own in sampled for further in range(reach)]
        numbers = uniforms(seeds, positions).reshape(len(sampled), reach)
        given = to_device(np.concatenate((base, numbers), axis=1), shifts.device)
        self._base, self._numbers = given[:, : base.shape[1]], given[:, base.shape[1] :]
        self._further = shifts[self._base[:, 0].long()]

    def of(self, place: int, going: int) -> torch.Tensor | None:
        """The table of the guesses behind `place` guesses of the first `going` sequences; None: none is sampled."""
        count = int((self._rows < going).sum())
        if count == 0:
            return None
        table = self._base[:count].clone()
        table[:, 2] = self._numbers[:count].gather(1, (self._further[:count] + place)[:, None])[:, 0]
        return table


def guesses_ahead(
    launched: AsyncStep,
    counts: Mapping[Sequence, int],
    decode: DecodeGraphs,
    verify: VerifyGraphs,
    paged: PagedModel,
    vocabulary: int,
) -> LaunchedGuesses | None:
    """See DraftModel.guess_ahead(); decode, verify and paged are the draft model's, vocabulary the other model's."""
    # Triton is not installed without CUDA.
    from server.engine.runtime.attention.kernels.accept_kernel import accept

    places: dict[Sequence, tuple[int, int, int]] = {}
    row = 0
    for chunk in launched.step.chunks:
        checked = len(launched.step.guesses.get(chunk.sequence.request_id, ()))
        places[chunk.sequence] = row, checked, chunk.start
        row += 1 + checked
    # Sequences with the most guesses come first, so that the others drop out at the end.
    sequences = sorted(counts, key=lambda sequence: -counts[sequence])
    asked = [counts[sequence] for sequence in sequences]
    rows, most, starts = zip(*(places[sequence] for sequence in sequences), strict=True)
    sampling = any(sequence.sampling.temperature > 0 for sequence in sequences)
    if launched.ids is None or (sampling and not samples_by_kernel()):
        return None
    firsts = to_device(np.array((rows, most), np.int64), launched.tokens.device)
    shifts, newest = accept(launched.ids, launched.tokens, firsts, max(most))
    if paged.vocab_size < vocabulary:
        newest = newest.clamp(max=paged.vocab_size - 1)
    own_shifts = shifts[::2].contiguous()
    tables = _Tables(sequences, paged.vocab_size, max(most) + asked[0], own_shifts) if sampling else None

    def next_tokens(logits: torch.Tensor, best: torch.Tensor, place: int) -> torch.Tensor:
        table = None if tables is None else tables.of(place, len(best))
        return best if table is None else sample_by_table(logits, table, best)

    found = verify.launch_shifted(_batch(sequences, starts, (0, 1), paged.block_size), newest, shifts)
    if found is None:
        return None
    columns = [next_tokens(found[0][1::2], found[1][1::2].clone(), 0)]
    for place in range(1, asked[0]):
        going = sum(count > place for count in asked)
        before = columns[-1][:going]
        if place == 1:
            batch = _batch(sequences[:going], starts, (2,), paged.block_size)
            found = decode.launch_shifted(batch, before, own_shifts[:going])
            following = None if found is None else next_tokens(*found, place)
        else:
            following = decode.launch_next(before, None if tables is None else tables.of(place, going))
        if following is None:
            return None
        columns.append(following)
    if paged.vocab_size > vocabulary:
        # A token beyond the other model's vocabulary stands for a wrong guess.
        columns = [column.clamp(max=vocabulary - 1) for column in columns]
    return LaunchedGuesses(sequences, columns)


def _batch(sequences: list[Sequence], starts: tuple[int, ...], further: tuple[int, ...], block_size: int) -> Batch:
    """Unknown tokens of each sequence, each by itself, `further` behind its start."""
    tables, count = sequences[0].tables, len(further)
    assert tables is not None
    places = [start + each for start, _ in zip(starts, sequences, strict=False) for each in further]
    rows = np.repeat(np.array([sequence.row for sequence in sequences], np.int64), count)
    ones, ids = np.ones(len(places), np.int64), [PLACEHOLDER] * len(places)
    wanted = np.arange(len(places))
    given = StepInput(tables, rows, np.array(places, np.int64), ones, ids, wanted, [None] * len(places))
    return batch_of(given, block_size)
