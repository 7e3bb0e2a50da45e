"""Captures CUDA graphs that share their memory, and replays them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import numpy as np
import torch

from server.engine.runtime.batch import pinned, to_device
from server.engine.runtime.exchange import is_alone
from server.engine.scheduling.sequence import PLACEHOLDER

_Results = TypeVar("_Results")


class CapturedStep:
    """Captured step: a CUDA graph, or several that are launched one after another."""

    def __init__(self) -> None:
        self.pieces: list[torch.cuda.CUDAGraph] = []

    def replay(self) -> None:
        """Launch all of it."""
        for piece in self.pieces:
            piece.replay()


class GraphPool:
    """Graphs that share their memory: the results of a replay are valid until the next replay of any of them.

    They must be replayed on the stream that is the current one when this is made.

    A graph's inputs are int64 [3, size]: token ids, positions, cache slots. Columns that a step does not fill are
    padding, whose keys and values go to scratch_slot.
    """

    def __init__(self, device: torch.device, scratch_slot: int) -> None:
        self._device = device
        self._scratch_slot = scratch_slot
        self._padding = np.array([[0], [0], [scratch_slot]])
        self.replays = 0
        # All captures share one stream, because cuBLAS keeps 32 MiB for each stream it has seen.
        self._stream = torch.cuda.Stream(device)
        self._handle = torch.cuda.graph_pool_handle()
        # While a step is captured: the step, and what ends the capture of its newest piece.
        self._captured = CapturedStep()
        self._open: ExitStack | None = None

    def new_inputs(self, size: int) -> torch.Tensor:
        """The inputs of a graph, all padding."""
        inputs = torch.zeros(3, size, dtype=torch.int64, device=self._device)
        inputs[2] = self._scratch_slot
        return inputs

    def fill(
        self,
        inputs: torch.Tensor,
        plan: Callable[[], object],
        values: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        newest: torch.Tensor | None = None,
        source: list[int] | None = None,
    ) -> None:
        """Fill a graph's inputs with values: the ids, positions and slots of a step's tokens; plan() lays out its attention.

        values are in host memory. newest: int64 on the device, the tokens of the step launched before, which take the places
        of PLACEHOLDER in the ids; source: which of newest is for each of the ids; None: those in the same places.
        """
        count = len(values[0])
        numbers = np.empty(inputs.shape, np.int64)
        for row, own in zip(numbers, values, strict=True):
            row[:count] = own.numpy()
        numbers[:, count:] = self._padding
        plan()
        inputs.copy_(pinned(numbers, inputs.device), non_blocking=True)
        if newest is None:
            return
        unknown = np.flatnonzero(numbers[0] == PLACEHOLDER)
        if source is None and len(unknown) == count:
            inputs[0, :count] = newest[:count]  # mostly
        elif len(unknown):
            of_newest = unknown if source is None else np.array(source)[unknown]
            places, rows = to_device(np.stack((unknown, of_newest)), inputs.device)
            inputs[0].index_copy_(0, places, newest.index_select(0, rows))

    def replay(self, captured: CapturedStep) -> None:
        """Replay a step whose inputs and layout are on the device."""
        captured.replay()
        self.replays += 1

    def capture(self, forward: Callable[[], _Results], warm_ups: int) -> tuple[CapturedStep, _Results]:
        """Capture forward() after `warm_ups` runs without a graph; see unowned() for its results."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(warm_ups):
                forward()
        torch.cuda.current_stream().wait_stream(self._stream)
        captured = self._captured = CapturedStep()
        try:
            with ExitStack() as self._open:
                self.cut()
                results = forward()
        finally:
            self._open = None
        return captured, results

    def cut(self) -> None:
        """Capture what follows as a graph of its own; nothing happens where nothing is being captured.

        The device begins with a graph when the host has launched all of it, which takes the host up to a microsecond for
        each kernel. Where a step is waited for, a short first graph lets the device begin while the rest is launched.
        """
        if self._open is None:
            return
        self._open.close()
        piece = torch.cuda.CUDAGraph()
        # NCCL has a thread of its own, which asks for events meanwhile.
        mode = "global" if is_alone() else "thread_local"
        self._open.enter_context(
            torch.cuda.graph(piece, pool=self._handle, stream=self._stream, capture_error_mode=mode)
        )
        self._captured.pieces.append(piece)


class _Memory:
    """A contiguous tensor's bytes, without the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.itemsize
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same contiguous tensor in the same memory, which the allocator may reuse once the original is gone.

    It is for a graph's results: only the latest replay's are read, so the next capture may use their memory, which the
    graphs' pool keeps.
    """
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)
