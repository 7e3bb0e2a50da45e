"""Exchanges of the processes of tensor parallelism: sums and rows of tensors, rank 0's tensors, what they agree on.

A process belongs to one group at most, which join() makes; where there is none, a rank is alone and exchanges nothing.
The operations are torch's own collectives, which CUDA graphs capture: NCCL on CUDA, gloo on CPU. Small tensors are summed by
one launch of our own where GPUs reach one another (peers.py). Every rank must make the same calls in the same order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from nf4_kernels.cuda.peers import PeerReducer
from server.engine.runtime.peers import connect_peers

Value = TypeVar("Value")

# Ranks reach their trials at the same time, except for the time that they compile or load for.
TIMEOUT = timedelta(minutes=10)
EXCHANGE_S = 8.0
"""Seconds that our own launches wait for a rank once requests are served; workers.STEP_S is a second more."""
ENVIRONMENT = {
    # On a host with many users the resources of NVLink multicast run out, and then what asks for them fails.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # All ranks are on one host.
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Environment variables of a group's processes, unless the user's say otherwise."""


class ExchangeError(RuntimeError):
    """A step failed on this rank, and the others may wait for it in an exchange: the group can do nothing any more."""


@dataclass(frozen=True)
class Membership:
    """A process's place in its group. store: a file of the group's own, in which the ranks find one another."""

    rank: int
    count: int
    store: str


class _Process:
    """This process's group; None: it is alone."""

    membership: Membership | None = None
    peers: PeerReducer | None = None


def join(membership: Membership, device: torch.device) -> None:
    """Meet the other ranks, replacing a group that was joined before; each rank has a device of its own.

    Raises RuntimeError where some ranks do not arrive within TIMEOUT."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    leave()
    rank, count = membership.rank, membership.count
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        init_method=f"file://{membership.store}",
        rank=rank,
        world_size=count,
        timeout=TIMEOUT,
        device_id=device if cuda else None,
    )
    _Process.membership = membership
    if cuda:
        _Process.peers = connect_peers(device, rank, count)
        set_timeout(TIMEOUT.total_seconds())


def leave() -> None:
    """Leave the group."""
    if _Process.membership is not None:
        if _Process.peers is not None:
            agreed(True)
            _Process.peers.close()
        _Process.membership = _Process.peers = None
        dist.destroy_process_group()


def set_timeout(seconds: float) -> None:
    """Set how long our own launches wait for a rank from now on. Then they fail, and this process's GPU work with them."""
    if _Process.peers is not None:
        _Process.peers.set_timeout(seconds)


def max_launch_bytes() -> int:
    """Bytes up to which a tensor is summed, with a residual, by one launch; 0 where there is no such launch."""
    return 0 if _Process.peers is None else _Process.peers.max_bytes


def is_alone() -> bool:
    """Whether there are no other ranks."""
    return _Process.membership is None


def agreed(success: bool) -> bool:
    """Whether all ranks have had success; success itself where there is one rank."""
    return least(int(success)) == 1


def least(number: int) -> int:
    """The least of all ranks' numbers; number itself where there is one rank."""
    if _Process.membership is None:
        return number
    found = torch.tensor([number], dtype=torch.int64)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


def broadcast(x: torch.Tensor) -> None:
    """Make x on every rank what it is on rank 0; nothing where there is one rank. x must be contiguous."""
    if _Process.membership is not None:
        dist.broadcast(x, 0)


def of_first(value: Value) -> Value:
    """Rank 0's value on every rank; value itself where there is one rank."""
    if _Process.membership is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, 0, device=torch.device("cpu"))
    return values[0]


# Its name since torch 2.13, and the one before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """x, in which the ranks' x and the residual, which is the same on all ranks, are added up."""
    if not _reduced_by_peers(x, residual):
        dist.all_reduce(x)
        if residual is not None:
            x += residual
    return x


def _reduced_by_peers(x: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether one launch has summed x. That depends on its size alone, which is the same on all ranks."""
    peers = _Process.peers
    if peers is None or not x.is_cuda or not 0 < x.nbytes <= max_launch_bytes() or x.nbytes % 16:
        return False
    dense = x if peers.takes(x) else x.clone(memory_format=torch.contiguous_format)
    if residual is not None and not peers.takes(residual):
        residual = residual.clone(memory_format=torch.contiguous_format)
    peers.all_reduce(dense, residual)
    if dense is not x:
        x.copy_(dense)
    return True


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """The ranks' x, [ranks, ...], in the order of the ranks."""
    assert _Process.membership is not None
    count = _Process.membership.count
    out = x.new_empty(count, *x.shape)
    # A step in which no sequence samples has no logits, on any rank.
    if x.numel():
        _gather(out.view(count * x.shape[0], *x.shape[1:]), x.contiguous())
    return out
