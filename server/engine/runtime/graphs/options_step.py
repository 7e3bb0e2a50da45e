"""A launched step whose sequences may have any options (NF4_ASYNC_OPTIONS, docs/adr/0022)."""

from __future__ import annotations

import logging

import torch

from server.engine.runtime.graphs.async_step import AsyncStep
from server.engine.runtime.sampling.device_sampler import DeviceSampler, LaunchedSample, ModelOutput
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.scheduling.step import Step

logger = logging.getLogger(__name__)


class OptionsStep:
    """A decode step on the device whose tokens a DeviceSampler samples, with any options; otherwise it is like AsyncStep."""

    def __init__(self, step: Step, output: ModelOutput, sampler: DeviceSampler) -> None:
        """The step's forward pass has been launched."""
        self.step = step
        self._output = output
        self._sampler = sampler
        self._launched: LaunchedSample | None = None
        # A grammar's mask follows from the last step's token, which the host has to know.
        if not step.is_constrained:
            self._launched = sampler.launch(output, step.sampled_sequences)

    @property
    def tokens(self) -> torch.Tensor:
        """int64, on the device: the token of each of step.sampled; there once complete() has been called."""
        assert self._launched is not None
        return self._launched.tokens

    def complete(self) -> bool:
        """Launch the sampling, if it had to wait until the tokens of the step before were read; call it then.

        Returns False where that failed, which is logged; then the step has to be executed.
        """
        if self._launched is not None:
            return True
        try:
            self._launched = self._sampler.launch(self._output, self.step.sampled_sequences)
        except torch.AcceleratorError:
            raise  # the device's context is lost
        except Exception:
            logger.exception("sampling for %d sequences failed", self.step.size)
        return self._launched is not None

    def read(self) -> list[Sampled]:
        """Wait for the tokens; one result for each of step.sampled."""
        assert self._launched is not None
        return self._launched.read()


LaunchedStep = AsyncStep | OptionsStep
"""A step that has been launched."""
