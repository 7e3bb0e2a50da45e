"""A step that has been launched and whose tokens have not been read (async scheduling)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from nf4_kernels.device_clock import DeviceClock
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.scheduling.scheduler import Step


@dataclass(frozen=True)
class AsyncStep:
    """A decode step on the device; the next one may be launched before read() has been called."""

    step: Step
    tokens: torch.Tensor
    """int64, on the device: the token of each of step.sampled."""
    copied: torch.Tensor
    """float32 [2, sequences] in host memory, valid once done has happened: the best logits, and the tokens."""
    times: tuple[DeviceClock, torch.Tensor] | None
    """The device's clock, and its totals, valid once done has happened."""
    done: torch.cuda.Event

    def complete(self) -> bool:
        """True: the sampling has been launched with the step."""
        return True

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
