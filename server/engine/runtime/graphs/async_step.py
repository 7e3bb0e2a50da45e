"""A step that has been launched and whose tokens have not been read (async scheduling)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nf4_kernels.device_clock import DeviceClock
from server.engine.runtime.sampling.device_sampler import DeviceSampler, LaunchedSample, ModelOutput
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.scheduling.scheduler import Step


@dataclass(frozen=True)
class AsyncStep:
    """A decode step of plain sequences on the device; the next one may be launched before read() has been called."""

    step: Step
    tokens: torch.Tensor
    """int64, on the device: the token of each of step.sampled."""
    copied: torch.Tensor
    """float32 [2, sequences] in host memory, valid once done has happened: the best logits, and the tokens."""
    times: tuple[DeviceClock, torch.Tensor] | None
    """The device's clock, and its totals, valid once done has happened."""
    done: torch.cuda.Event

    def complete(self) -> None:
        """Nothing: the sampling has been launched with the step."""

    def read(self) -> list[Sampled]:
        """Wait for the tokens; one result for each of step.sampled."""
        self.done.synchronize()
        if self.times is not None:
            clock, totals = self.times
            clock.note(totals)
        best, tokens = self.copied.tolist()
        return [
            Sampled(int(token)) if math.isfinite(value) else Sampled(0, error="the model's logits are not numbers")
            for value, token in zip(best, tokens, strict=True)
        ]


class OptionsStep:
    """A decode step on the device whose tokens a DeviceSampler samples, with any options; else as AsyncStep."""

    def __init__(self, step: Step, output: ModelOutput, sampler: DeviceSampler, clock: DeviceClock | None) -> None:
        """The step's forward pass has been launched. clock: the device's, where it times the kernels."""
        self.step = step
        self._output = output
        self._sampler = sampler
        self._launched: LaunchedSample | None = None
        self._times: tuple[DeviceClock, torch.Tensor] | None = None
        if clock is not None:
            self._times = clock, torch.empty_like(clock.totals, device="cpu", pin_memory=clock.totals.is_cuda)
            self._times[1].copy_(clock.totals, non_blocking=True)
        # A grammar's mask follows from the last step's token, which the host has to know.
        if not any(chunk.sequence.constraint is not None for chunk in step.chunks):
            self.complete()

    @property
    def tokens(self) -> torch.Tensor:
        """int64, on the device: the token of each of step.sampled; there once complete() has been called."""
        assert self._launched is not None
        return self._launched.tokens

    def complete(self) -> None:
        """Launch the sampling, if it had to wait until the tokens of the step before were read. Call that then."""
        if self._launched is None:
            self._launched = self._sampler.launch(self._output, [chunk.sequence for chunk in self.step.sampled])

    def read(self) -> list[Sampled]:
        """Wait for the tokens; one result for each of step.sampled."""
        assert self._launched is not None
        results = self._launched.read()
        if self._times is not None:
            clock, totals = self._times
            clock.note(totals)
        return results


LaunchedStep = AsyncStep | OptionsStep
"""A step that has been launched."""
