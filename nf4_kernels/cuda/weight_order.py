"""The weight order: which GEMM's weight comes after which, so that a launch prefetches the next one's into L2.

Small batches are bound by the memory that weights come from, and it idles at the end of every launch, under the kernels
between two GEMMs and while the next launch starts. The order is looked up when a GEMM is captured in a CUDA graph (Hopper
and later). It changes no result. The functions are thread-safe.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nf4_kernels.format import Weight


class _Held:
    """A weight's tensors by address, without keeping their memory."""

    def __init__(self, weight: Weight) -> None:
        tensors = (weight.packed, weight.absmax, weight.absmax_8bit, weight.absmax_offset)
        self.shape = weight.shape
        self.blocksize = weight.blocksize
        self.packed = weight.packed.data_ptr()
        self.scales = _span(weight.absmax if weight.absmax_8bit is None else weight.absmax_8bit)
        nested = weight.absmax_8bit is not None
        self.nested = nested
        self.absmax = _span(weight.absmax) if nested else (0, 0)
        offset = weight.absmax_offset
        self.offsets = _span(offset) if nested and offset is not None and offset.numel() > 1 else (0, 0)
        self._memory = [StorageWeakRef(t.untyped_storage()) for t in tensors if t is not None]

    @property
    def lives(self) -> bool:
        return not any(memory.expired() for memory in self._memory)


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


@dataclass(frozen=True)
class _Pair:
    first: _Held
    then: _Held


_pairs: dict[int, _Pair] = {}
_lock = threading.Lock()


def prefetch_next(weight: Weight, following: Weight | None) -> None:
    """Say that a GEMM with `following` comes after each one with `weight`; None takes that back.

    GEMMs with `weight` that are captured in CUDA graphs from here on bring the beginning of `following` into L2 as they
    end. Neither weight is kept alive: once the memory of either is gone, later captures do not prefetch. A graph holds the
    addresses: free neither weight while it is replayed. No effect on CPU and before Hopper.
    """
    with _lock:
        for address in [address for address, pair in _pairs.items() if not (pair.first.lives and pair.then.lives)]:
            del _pairs[address]
        _pairs.pop(weight.packed.data_ptr(), None)
        if following is not None and weight.packed.device == following.packed.device:
            _pairs[weight.packed.data_ptr()] = _Pair(_Held(weight), _Held(following))


def next_weight(packed: int) -> _Held | None:
    """Next weight after the one whose codes lie at this address, while both are in memory."""
    with _lock:
        pair = _pairs.get(packed)
    return pair.then if pair is not None and pair.first.lives and pair.then.lives else None
