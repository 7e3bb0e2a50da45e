"""Steps that are launched before the tokens of the one before have been read (async scheduling)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from server.engine.runtime.sampling.sampler import LaunchedSample, ModelOutput, Sampled, Sampler
from server.engine.runtime.sampling.verification import sampled_sequences, verified
from server.engine.scheduling.step import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """Way in which another rank gets the tokens of a decode step, which it samples like this one."""

    follows: bool
    """Whether tokens of the step launched before stand in the places of PLACEHOLDER ids."""
    source: list[int] | None
    """Each sequence's row among that step's tokens; None: the same rows."""
    table: npt.NDArray[np.float64] | None
    """See RandomRows.table()."""


def rows_before(step: Step, previous: Step) -> list[int] | None:
    """Each sequence's row among the tokens that the step before samples, 0 where it has none; None: the same rows."""
    sequences, before = step.sequences, previous.sampled_sequences
    if sequences == before:
        return None
    rows = {id(sequence): row for row, sequence in enumerate(before)}
    return [rows.get(id(sequence), 0) for sequence in sequences]


class LaunchedStep:
    """A step on the device; the next one may be launched before read() has been called."""

    def __init__(
        self,
        step: Step,
        output: ModelOutput,
        sampler: Sampler,
        read_before: bool = False,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """The step's forward pass has been launched.

        read_before: whether the tokens of the step before have been read. waiting: entered while read() waits.
        """
        self.step = step
        self._output = output
        self._sampler = sampler
        self._sequences = sampled_sequences(step)
        self._waiting = waiting
        self._launched: LaunchedSample | None = None
        # A grammar's mask follows from the last step's token, which the host has to know.
        if read_before or not step.is_constrained:
            self._launched = sampler.launch(output, self._sequences)

    @property
    def tokens(self) -> torch.Tensor:
        """int64, on the device: the tokens; there once complete() has been called."""
        assert self._launched is not None
        return self._launched.tokens

    def complete(self) -> bool:
        """Launch the sampling, if it had to wait until the tokens of the step before were read; call it then.

        Returns False where that failed, which is logged; then the step has to be executed.
        """
        if self._launched is not None:
            return True
        try:
            self._launched = self._sampler.launch(self._output, self._sequences)
        except torch.AcceleratorError:
            raise  # the device's context is lost
        except Exception:
            logger.exception("sampling for %d sequences failed", self.step.size)
        return self._launched is not None

    def read(self) -> list[Sampled]:
        """Wait for the tokens; one result for each of step.sampled."""
        assert self._launched is not None
        with self._waiting():
            results = self._launched.read()
        self.step.read_drafts()
        return verified(self.step, results)
