"""A step that has been launched and whose tokens have not been read (async scheduling)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch

from server.engine.runtime.sampling.inverse_cdf import sampling_table
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.runtime.transfers.host_results import Posted
from server.engine.scheduling.step import Step


@dataclass(frozen=True)
class Launch:
    """What a decode step that samples on the device needs beside its batch."""

    follows: bool
    """Whether tokens of the step launched before stand in the places of PLACEHOLDER ids."""
    source: list[int] | None
    """Each sequence's row among that step's tokens; None: the same rows."""
    table: Callable[[], npt.NDArray[np.float64] | None]
    """Gives the sampling_table() of the sequences. It is made when it is first asked for, which is while the step runs."""

    @classmethod
    def of(cls, step: Step, previous: AsyncStep | None, vocabulary: int) -> Launch:
        """The launch of a decode step; previous is the step before it where that has not been read yet."""
        sequences = step.sequences
        source = None if previous is None else rows_before(step, previous.step)
        return cls(previous is not None, source, cache(partial(sampling_table, sequences, vocabulary)))


def rows_before(step: Step, previous: Step) -> list[int] | None:
    """Each sequence's row among the tokens that the step before samples, 0 where it has none; None: the same rows."""
    sequences, before = step.sequences, previous.sampled_sequences
    if sequences == before:
        return None
    rows = {id(sequence): row for row, sequence in enumerate(before)}
    return [rows.get(id(sequence), 0) for sequence in sequences]


@dataclass(frozen=True)
class AsyncStep:
    """A decode step on the device; the next one may be launched before read() has been called."""

    step: Step
    posted: Posted
    """The best logit and the token of each of step.sampled."""
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while read() waits."""

    @property
    def tokens(self) -> torch.Tensor:
        """int64, on the device: the token of each of step.sampled."""
        return self.posted.tokens

    def complete(self) -> bool:
        """True: the sampling has been launched with the step."""
        return True

    def read(self) -> list[Sampled]:
        """Wait for the tokens; one result for each of step.sampled."""
        with self.waiting():
            best, tokens = self.posted.wait().view(2, -1).tolist()
        return [
            Sampled(int(token)) if math.isfinite(value) else Sampled(0, error="the model's logits are not numbers")
            for value, token in zip(best, tokens, strict=True)
        ]
