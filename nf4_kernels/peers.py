"""Sums over the GPUs of a host in one launch: `PeerReducer`, for the small tensors that tensor parallelism exchanges.

Sources: csrc/cuda/all_reduce.cu and inbox.cu. Each rank is a process with a GPU; they write to one another through CUDA IPC,
over NVLink or PCIe, without NVLink multicast. The caller has to bring the ranks' handles to one another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from nf4_kernels.cuda_library import AllReduce, raise_for, usable
from nf4_kernels.params import DTYPES

MOST_RANKS = 8
MOST_BYTES = 2097152
"""The largest tensor, in bytes, with two ranks. This and MOST_RANKS are limits of csrc/params.h."""
_HANDLE_BYTES = 64
_CHUNK = 16


def most_bytes(ranks: int) -> int:
    """The largest tensor that one launch sums over this many ranks, in bytes; what a rank sends grows with their number."""
    return MOST_BYTES // (1 if ranks <= 2 else 2 if ranks <= 4 else 4)


class PeerReducer:
    """One rank's side. All ranks make one, open() one another's inboxes, and then make the same calls in the same order.

    Launches may be captured in CUDA graphs. The inbox takes 16 MB of the GPU's memory.
    """

    def __init__(self, device: torch.device, rank: int, ranks: int) -> None:
        """Raises ValueError for ranks outside of 2 to MOST_RANKS, KernelError where there is no such memory."""
        if not 2 <= ranks <= MOST_RANKS or not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}: there must be 2 to {MOST_RANKS} ranks")
        self.device = device
        self.rank = rank
        self.ranks = ranks
        self._library = usable()
        self._opened: dict[int, int] = {}
        inbox, handle = ctypes.c_void_p(), ctypes.create_string_buffer(_HANDLE_BYTES)
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # torch makes the device's context
            self._check(self._library.nf4_cuda_inbox_create(ranks, ctypes.byref(inbox), handle), "an inbox")
        self._inbox: int = inbox.value or 0
        self.handle = handle.raw
        """The handle that the other ranks need, 64 bytes."""

    def open(self, handles: Sequence[bytes]) -> None:
        """Open the others' inboxes; handles are those of all ranks, in order. KernelError where a GPU cannot be reached."""
        if len(handles) != self.ranks or any(len(handle) != _HANDLE_BYTES for handle in handles):
            raise ValueError(f"there must be {self.ranks} handles of {_HANDLE_BYTES} bytes")
        with torch.cuda.device(self.device):
            for rank, handle in enumerate(handles):
                if rank == self.rank:
                    continue
                inbox = ctypes.c_void_p()
                status = self._library.nf4_cuda_inbox_open(handle, ctypes.byref(inbox))
                self._check(status, f"the inbox of rank {rank}")
                self._opened[rank] = inbox.value or 0

    def takes(self, x: Tensor) -> bool:
        """Whether all_reduce() takes x: dense, of up to most_bytes(ranks), a multiple of 16 bytes, aligned to 16."""
        return (
            x.dtype in DTYPES
            and x.nbytes <= most_bytes(self.ranks)
            and x.nbytes % _CHUNK == 0
            and x.data_ptr() % _CHUNK == 0
            and x.is_contiguous()
        )

    def all_reduce(self, x: Tensor, residual: Tensor | None = None, fatal: bool = True) -> None:
        """x = residual + the sum of all ranks' x, in float32 in the order of the ranks, rounded once.

        residual is like x. Where a rank does not arrive within the patience, a fatal launch fails, and with it all GPU
        work of this process; after one that is not fatal x holds anything, and silent_rank() says which rank it was.
        Raises ValueError for tensors that takes() refuses, KernelError where the launch fails.
        """
        if not self.takes(x) or x.device != self.device:
            most = most_bytes(self.ranks)
            raise ValueError(f"x must be dense on {self.device}, of up to {most} bytes in 16s, got {x.nbytes}")
        if residual is not None and not (residual.shape == x.shape and residual.dtype == x.dtype):
            raise ValueError(f"residual must be {x.dtype} of shape {tuple(x.shape)}")
        if residual is not None and (residual.device != x.device or not self.takes(residual)):
            raise ValueError(f"residual must be dense on {self.device}")
        if len(self._opened) != self.ranks - 1:
            raise ValueError("the other ranks' inboxes have not been opened")
        inboxes = [self._opened.get(rank, self._inbox) for rank in range(self.ranks)]
        with torch.cuda.device(self.device):
            reduce = AllReduce(
                x=x.data_ptr(),
                residual=None if residual is None else residual.data_ptr(),
                out=x.data_ptr(),
                count=x.numel(),
                inboxes=(ctypes.c_void_p * MOST_RANKS)(*inboxes),
                dtype=DTYPES[x.dtype],
                rank=self.rank,
                ranks=self.ranks,
                fatal=fatal,
                stream=torch.cuda.current_stream(self.device).cuda_stream,
            )
            self._check(self._library.nf4_cuda_all_reduce(ctypes.byref(reduce)), "all_reduce")

    def set_patience(self, seconds: float) -> None:
        """Set how long later launches wait for a rank; initially without limit. Do not call it while a graph is captured."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            nanoseconds = ctypes.c_uint64(int(seconds * 1e9))
            self._check(self._library.nf4_cuda_inbox_patience(self._inbox, nanoseconds), "patience")

    def silent_rank(self) -> int | None:
        """A rank for which a launch has waited too long; None: there was none. Waits for the device."""
        found = ctypes.c_int32()
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            self._check(self._library.nf4_cuda_inbox_silent_rank(self._inbox, ctypes.byref(found)), "silent_rank")
        return None if found.value < 0 else found.value

    def close(self) -> None:
        """Give the memory back once no rank launches any more. A process that ends need not call it."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            for inbox in self._opened.values():
                self._library.nf4_cuda_inbox_close(inbox)
            self._opened.clear()
            self._library.nf4_cuda_inbox_free(self._inbox)
            self._inbox = 0

    def _check(self, status: int, what: str) -> None:
        raise_for(self._library, status, what)
