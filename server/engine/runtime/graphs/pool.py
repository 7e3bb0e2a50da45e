"""Captures CUDA graphs that share their memory, and replays them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from server.engine.runtime.exchange import is_alone

_Results = TypeVar("_Results")


class GraphPool:
    """Graphs that share their memory: the results of a replay are valid until the next replay of any of them.

    A graph's inputs are int64 [3, size]: token ids, positions, cache slots. Columns that a step does not fill are
    padding, whose keys and values go to scratch_slot.
    """

    def __init__(self, device: torch.device, scratch_slot: int) -> None:
        self._device = device
        self._scratch_slot = scratch_slot
        self._planned = torch.cuda.Event()
        self.replays = 0
        """Graphs replayed so far."""
        # All captures share one stream, because cuBLAS keeps 32 MiB for each stream it has seen.
        self._stream = torch.cuda.Stream(device)
        self._handle = torch.cuda.graph_pool_handle()

    def new_inputs(self, size: int) -> torch.Tensor:
        """The inputs of a graph, all padding."""
        inputs = torch.zeros(3, size, dtype=torch.int64, device=self._device)
        inputs[2] = self._scratch_slot
        return inputs

    def replay(
        self,
        graph: torch.cuda.CUDAGraph,
        plan: Callable[[], object],
        inputs: torch.Tensor,
        values: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Replay a graph on values: the ids, positions and slots of a step's tokens; plan() lays out its attention."""
        # The plan's host memory may be written again only when its copies to the device are over.
        self._planned.synchronize()
        plan()
        count = len(values[0])
        for row, own in zip(inputs, values, strict=True):
            row[:count].copy_(own)
        inputs[2, count:] = self._scratch_slot
        self._planned.record()
        graph.replay()
        self.replays += 1

    def capture(self, forward: Callable[[], _Results], warm_ups: int) -> tuple[torch.cuda.CUDAGraph, _Results]:
        """A graph of forward(), captured after `warm_ups` runs without one; see unowned() for its results."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(warm_ups):
                forward()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # NCCL has a thread of its own, which asks for events meanwhile.
        mode = "global" if is_alone() else "thread_local"
        with torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode=mode):
            results = forward()
        return graph, results


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
