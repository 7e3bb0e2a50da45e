"""Draft tokens that have been launched and that the host has not read."""

from __future__ import annotations

import itertools

import torch

from server.engine.runtime.batch import ToHost
from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.step import Drafts, Step


class LaunchedDrafts:
    """Draft tokens that a draft model samples on its device."""

    def __init__(self, sequences: list[Sequence], columns: list[torch.Tensor]) -> None:
        """columns: int64, the first token of every sequence, the second of the first len(columns[1]) sequences, ..."""
        self.tokens = torch.cat(columns)
        """int64, on the device: all columns, one after another."""
        self._sequences = sequences
        self._lengths = [len(column) for column in columns]
        # Copied at once, so that they are on the host when the step that verifies them has ended.
        self._copied = ToHost(self.tokens)

    def source(self, step: Step) -> list[int]:
        """For each token of a step that decodes, the place in tokens of the draft token that it is, or 0."""
        index = {sequence.request_id: place for place, sequence in enumerate(self._sequences)}
        found: list[int] = []
        for chunk in step.chunks:
            found.append(0)
            if chunk.draft_tokens:
                own, lengths = index[chunk.sequence.request_id], self._lengths[: len(chunk.draft_tokens) - 1]
                found += [begin + own for begin in itertools.accumulate(lengths, initial=0)]
        return found

    def read(self) -> Drafts:
        """Wait for the draft tokens; a step may verify fewer of them."""
        found: list[list[int]] = [[] for _ in self._sequences]
        tokens = iter(self._copied.wait().tolist())
        for length in self._lengths:
            for own in found[:length]:
                own.append(next(tokens))
        return {sequence.request_id: own for sequence, own in zip(self._sequences, found, strict=True)}
