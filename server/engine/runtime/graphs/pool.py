"""Captures CUDA graphs that share their memory, and replays them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from server.engine.runtime.attention.graph_backend import PLANS_AHEAD, HostLayout
from server.engine.runtime.exchange import is_alone
from server.engine.runtime.transfers.kernels_in_use import has_step_kernels
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
        # By size, pinned memory from which inputs are copied, as a tensor and as an array: as many as there are events,
        # which are taken in turn, so that a step can be laid out before the copies of the one before are over.
        self._pinned: dict[int, list[tuple[torch.Tensor, npt.NDArray[np.int64]]]] = {}
        self._planned = [torch.cuda.Event() for _ in range(PLANS_AHEAD)]
        self._turn = 0
        # Finding the current stream takes Python some microseconds, which the device waits for.
        self._replaying = torch.cuda.current_stream(device)
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
        if size not in self._pinned:
            tensors = [torch.empty(4, size, dtype=torch.int64, pin_memory=True) for _ in self._planned]
            self._pinned[size] = [(tensor, tensor.numpy()) for tensor in tensors]
        return inputs

    def fill(
        self,
        inputs: torch.Tensor,
        plan: Callable[[], HostLayout | None],
        values: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        newest: torch.Tensor | None = None,
        source: list[int] | None = None,
    ) -> None:
        """Fill a graph's inputs with values: the ids, positions and slots of a step's tokens; plan() lays out its attention.

        values are in host memory. newest: int64 on the device, the tokens of the step launched before, which take the places
        of PLACEHOLDER in the ids; source: which of newest is for each of the ids; None: those in the same places.
        """
        # The plan's host memory and ours may be written again only when their copies to the device are over.
        turn = self._turn = (self._turn + 1) % len(self._planned)
        self._planned[turn].synchronize()
        count = len(values[0])
        pinned, numbers = self._pinned[inputs.shape[1]][turn]
        for row, own in zip(numbers[:3], values, strict=True):
            row[:count] = own.numpy()
        # What is left of another step may be no token of this model.
        numbers[:3, count:] = self._padding
        if newest is not None:
            numbers[3, :count] = np.arange(count) if source is None else source
        # Last, because what is new in block tables counts as written then.
        layout = plan()
        try:
            self._write(inputs, pinned, newest, layout)
        except Exception:
            if layout is not None:
                layout.forget()
            raise
        self._planned[turn].record(self._replaying)

    def _write(
        self, inputs: torch.Tensor, pinned: torch.Tensor, newest: torch.Tensor | None, layout: HostLayout | None
    ) -> None:
        if has_step_kernels(inputs):
            # Triton is not installed without CUDA.
            from server.engine.runtime.transfers.step_kernels import lay_out

            lay_out(inputs, pinned, newest, PLACEHOLDER, layout)
            return
        if layout is not None:
            layout.write()
        given = pinned.to(inputs.device, non_blocking=True)
        inputs.copy_(given[:3])
        if newest is not None:
            unknown = inputs[0] == PLACEHOLDER
            torch.where(unknown, newest[given[3].clamp(0, len(newest) - 1)], inputs[0], out=inputs[0])

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
