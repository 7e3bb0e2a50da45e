"""Guesses that have been launched and that the host has not read."""

from __future__ import annotations

import itertools

import torch

from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.step import Step


class LaunchedGuesses:
    """Guesses that a draft model samples on its device."""

    def __init__(self, sequences: list[Sequence], columns: list[torch.Tensor]) -> None:
        """columns: int64, the first guess of every sequence, the second of the first len(columns[1]) sequences, ..."""
        self.tokens = torch.cat(columns)
        """int64, on the device: all columns, one after another."""
        self._sequences = sequences
        self._lengths = [len(column) for column in columns]
        # Copied at once, so that they are on the host when the step that checks them has ended.
        self._copied, self._done = self.tokens, None
        if self.tokens.is_cuda:
            self._copied = torch.empty_like(self.tokens, device="cpu", pin_memory=True)
            self._copied.copy_(self.tokens, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def source(self, step: Step) -> list[int]:
        """For each token of a step, the place in tokens of the guess that it is, or 0."""
        index = {sequence.request_id: place for place, sequence in enumerate(self._sequences)}
        found: list[int] = []
        for chunk in step.chunks:
            found.append(0)
            name = chunk.sequence.request_id
            count = len(step.guesses.get(name, ()))
            if count:
                own = index[name]
                found += [begin + own for begin in itertools.accumulate(self._lengths[: count - 1], initial=0)]
        return found

    def read(self) -> dict[str, list[int]]:
        """Wait for the guesses, by request id; a step may check fewer of them."""
        found: list[list[int]] = [[] for _ in self._sequences]
        if self._done is not None:
            self._done.synchronize()
        tokens = iter(self._copied.tolist())
        for length in self._lengths:
            for own in found[:length]:
                own.append(next(tokens))
        return {sequence.request_id: own for sequence, own in zip(self._sequences, found, strict=True)}
