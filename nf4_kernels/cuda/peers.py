"""Sums over the GPUs of a host in one launch: `PeerReducer`, for the small tensors that tensor parallelism exchanges.

Sources: csrc/cuda/all_reduce.cu and ipc_buffer.cu. Each rank is a process with a GPU; they write to one another through
CUDA IPC, over NVLink or PCIe, without NVLink multicast. The caller has to bring the ranks' handles to one another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from nf4_kernels.cuda.library import AllReduce, raise_for, usable
from nf4_kernels.params import DTYPES

MAX_RANKS = 8
LL_BYTES = 2097152
"""The largest tensor, in bytes, that two ranks sum in the LL protocol. This and MAX_RANKS are limits of csrc/params.h."""
LL128_BYTES = 7864320
"""The largest one in the LL128 protocol, which sends half of LL's bytes."""
MIN_LL128_BYTES = 32768
"""From here on LL128 is used where there is NVLink: it reads twice what has come, which few bytes do not make up for."""
_IPC_BYTES = 64
HANDLE_BYTES = _IPC_BYTES + 1
_CHUNK = 16


def max_bytes(ranks: int, ll128: bool) -> int:
    """The largest tensor that one launch sums over this many ranks, in bytes; what a rank sends grows with their number.

    With more than two ranks the kernel takes twice as many bytes in LL128, but NCCL is faster there (four H100).
    """
    divisor = 1 if ranks <= 2 else 2 if ranks <= 4 else 4
    if ll128:
        return LL128_BYTES // (divisor if ranks <= 2 else 2 * divisor)
    return LL_BYTES // divisor


class PeerReducer:
    """One rank's side. All ranks make one, open() one another's IPC buffers, and then make the same calls in the same order.

    Launches may be captured in CUDA graphs. The IPC buffer takes 16 MB of the GPU's memory, and 32 MB more for LL128.
    """

    def __init__(self, device: torch.device, rank: int, ranks: int, ll128: bool | None = None) -> None:
        """ll128: whether 128 bytes of a warp arrive together, as they do over NVLink; None: whether that links all GPUs
        that this process sees. It is used if all ranks have it.

        Raises ValueError for ranks outside of 2 to MAX_RANKS, KernelError where there is no such memory.
        """
        if not 2 <= ranks <= MAX_RANKS or not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}: there must be 2 to {MAX_RANKS} ranks")
        self.device = device
        self.rank = rank
        self.ranks = ranks
        self._library = usable()
        self._opened: dict[int, int] = {}
        buffer, handle = ctypes.c_void_p(), ctypes.create_string_buffer(_IPC_BYTES)
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # torch makes the device's context
            self._ll128 = self._is_linked() if ll128 is None else ll128
            status = self._library.nf4_cuda_ipc_buffer_create(ranks, self._ll128, ctypes.byref(buffer), handle)
            self._check(status, "an IPC buffer")
        self._buffer: int = buffer.value or 0
        self.handle = handle.raw + bytes([self._ll128])
        """The handle that the other ranks need, HANDLE_BYTES long."""

    def open(self, handles: Sequence[bytes]) -> None:
        """Open the others' IPC buffers; handles: of all ranks, in order. KernelError if a GPU cannot be reached."""
        if len(handles) != self.ranks or any(len(handle) != HANDLE_BYTES for handle in handles):
            raise ValueError(f"there must be {self.ranks} handles of {HANDLE_BYTES} bytes")
        self._ll128 = all(handle[_IPC_BYTES] for handle in handles)
        with torch.cuda.device(self.device):
            for rank, handle in enumerate(handles):
                if rank == self.rank:
                    continue
                buffer = ctypes.c_void_p()
                status = self._library.nf4_cuda_ipc_buffer_open(handle[:_IPC_BYTES], ctypes.byref(buffer))
                self._check(status, f"the IPC buffer of rank {rank}")
                self._opened[rank] = buffer.value or 0

    @property
    def max_bytes(self) -> int:
        """The largest tensor that one launch sums, in bytes; the same on all ranks once IPC buffers are open."""
        return max_bytes(self.ranks, self._ll128)

    def takes(self, x: Tensor) -> bool:
        """Whether all_reduce() takes x: dense, of up to max_bytes, a multiple of 16 bytes, aligned to 16."""
        return (
            x.dtype in DTYPES
            and x.nbytes <= self.max_bytes
            and x.nbytes % _CHUNK == 0
            and x.data_ptr() % _CHUNK == 0
            and x.is_contiguous()
        )

    def all_reduce(
        self, x: Tensor, residual: Tensor | None = None, fatal: bool = True, ll128: bool | None = None
    ) -> None:
        """x = residual + the sum of all ranks' x, in float32 in the order of the ranks, rounded once.

        ll128: the protocol, the same on all ranks; None: the one that is faster for x's size.
        residual is like x. Where a rank does not arrive within the timeout, a fatal launch fails, and with it all GPU
        work of this process; after one that is not fatal x holds anything, and hung_rank() says which rank it was.
        Raises ValueError for tensors that takes() refuses, KernelError where the launch fails.
        """
        if not self.takes(x) or x.device != self.device:
            most = f"{self.max_bytes} bytes in 16s"
            raise ValueError(f"x must be dense on {self.device}, of up to {most}, got {x.nbytes}")
        if residual is not None and not (residual.shape == x.shape and residual.dtype == x.dtype):
            raise ValueError(f"residual must be {x.dtype} of shape {tuple(x.shape)}")
        if residual is not None and (residual.device != x.device or not self.takes(residual)):
            raise ValueError(f"residual must be dense on {self.device}")
        if (ll128 and not self._ll128) or (ll128 is False and x.nbytes > max_bytes(self.ranks, False)):
            raise ValueError(f"LL128 is {'not used here' if ll128 else f'what {x.nbytes} bytes need'}")
        if len(self._opened) != self.ranks - 1:
            raise ValueError("the other ranks' IPC buffers have not been opened")
        buffers = [self._opened.get(rank, self._buffer) for rank in range(self.ranks)]
        with torch.cuda.device(self.device):
            reduce = AllReduce(
                x=x.data_ptr(),
                residual=None if residual is None else residual.data_ptr(),
                out=x.data_ptr(),
                count=x.numel(),
                buffers=(ctypes.c_void_p * MAX_RANKS)(*buffers),
                dtype=DTYPES[x.dtype],
                rank=self.rank,
                ranks=self.ranks,
                fatal=fatal,
                ll128=self._ll128 and x.nbytes >= MIN_LL128_BYTES if ll128 is None else ll128,
                stream=torch.cuda.current_stream(self.device).cuda_stream,
            )
            self._check(self._library.nf4_cuda_all_reduce(ctypes.byref(reduce)), "all_reduce")

    def set_timeout(self, seconds: float) -> None:
        """Set how long later launches wait for a rank; initially without limit. Do not call it while a graph is captured."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            nanoseconds = ctypes.c_uint64(int(seconds * 1e9))
            self._check(self._library.nf4_cuda_ipc_buffer_set_timeout(self._buffer, nanoseconds), "set_timeout")

    def hung_rank(self) -> int | None:
        """A rank for which a launch has waited too long; None: there was none. Waits for the device."""
        found = ctypes.c_int32()
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            self._check(self._library.nf4_cuda_ipc_buffer_hung_rank(self._buffer, ctypes.byref(found)), "hung_rank")
        return None if found.value < 0 else found.value

    def close(self) -> None:
        """Give the memory back once no rank launches any more. A process that ends need not call it."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            for buffer in self._opened.values():
                self._library.nf4_cuda_ipc_buffer_close(buffer)
            self._opened.clear()
            self._library.nf4_cuda_ipc_buffer_free(self._buffer)
            self._buffer = 0

    def _is_linked(self) -> bool:
        linked = ctypes.c_int32()
        self._check(self._library.nf4_cuda_is_linked(ctypes.byref(linked)), "is_linked")
        return linked.value != 0

    def _check(self, status: int, what: str) -> None:
        raise_for(self._library, status, what)
