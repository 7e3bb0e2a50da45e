"""Results of steps' sequences, on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nf4_kernels.cuda.device_clock import DeviceClock
from server.engine.runtime.transfers.kernels_in_use import has_step_kernels

# Results that may be on their way or unread at a time. At most two steps are launched ahead.
_TURNS = 8


@dataclass
class _Turn:
    """Pinned memory of one step's results."""

    numbers: torch.Tensor
    times: torch.Tensor | None
    done: torch.cuda.Event
    uses: int = 0
    """Number of steps that have had it."""


@dataclass(frozen=True)
class Posted:
    """A step's best logits and tokens, to be read once; its memory is another step's, some steps later."""

    tokens: torch.Tensor
    """int64 [S], on the device: a copy."""
    numbers: torch.Tensor
    """float32 [2 * S] in host memory, valid once done has happened: best logits, and tokens, which are exact."""
    done: torch.cuda.Event | None
    clock: DeviceClock | None
    times: torch.Tensor | None
    """The clock's totals, as numbers."""
    turn: _Turn | None = None
    use: int = 0
    """turn.uses of this step."""

    def wait(self) -> torch.Tensor:
        """The numbers, once they are there; the clock has noted its totals then. To be called once."""
        if self.turn is not None and self.turn.uses != self.use:
            raise RuntimeError("another step has the memory of these results, which were to be read before")
        if self.done is not None:
            self.done.synchronize()
        if self.clock is not None and self.times is not None:
            self.clock.note(self.times.clone())
        return self.numbers


class HostResults:
    """Brings steps' results to the host. Not thread-safe."""

    def __init__(self, clock: DeviceClock | None = None) -> None:
        """clock: the device's, whose totals come with each result; None: none do."""
        self._clock = clock
        self._turns: list[_Turn] = []
        self._next = 0

    def post(self, best: torch.Tensor, tokens: torch.Tensor) -> Posted:
        """Send best, float32 [S], and tokens, int64 [S], which may be overwritten by what is launched behind this."""
        if not tokens.is_cuda:
            return Posted(tokens, torch.cat((best.float(), tokens.float())), None, None, None)
        best, tokens = best.contiguous(), tokens.contiguous()
        count, clock = len(tokens), self._clock
        turn = self._turn(2 * count)
        if has_step_kernels(tokens):
            # Triton is not installed without CUDA.
            from server.engine.runtime.transfers.step_kernels import post

            own = post(best, tokens, turn.numbers, None if clock is None else clock.totals, turn.times)
        else:
            own = tokens.clone()
            turn.numbers[:count].copy_(best, non_blocking=True)
            turn.numbers[count : 2 * count].copy_(tokens.float(), non_blocking=True)
            if clock is not None and turn.times is not None:
                turn.times.copy_(clock.totals, non_blocking=True)
        turn.done.record()
        return Posted(own, turn.numbers[: 2 * count], turn.done, clock, turn.times, turn, turn.uses)

    def _turn(self, count: int) -> _Turn:
        """Memory for `count` numbers that no launch writes any more."""
        index = self._next = (self._next + 1) % _TURNS
        if not self._turns:
            self._turns = [_Turn(_pinned(count), self._new_times(), torch.cuda.Event()) for _ in range(_TURNS)]
        turn = self._turns[index]
        turn.done.synchronize()
        turn.uses += 1
        if len(turn.numbers) < count:
            turn.numbers = _pinned(count)
        return turn

    def _new_times(self) -> torch.Tensor | None:
        return None if self._clock is None else torch.empty_like(self._clock.totals, device="cpu", pin_memory=True)


def _pinned(count: int) -> torch.Tensor:
    return torch.empty(1 << (count - 1).bit_length(), dtype=torch.float32, pin_memory=True)
