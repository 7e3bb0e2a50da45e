"""Set-up of ranks that sum small tensors in one launch of our own (nf4_kernels.cuda.peers), if GPUs reach one another."""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist

from nf4_kernels import cuda
from nf4_kernels.cuda.library import KernelError
from nf4_kernels.cuda.peers import HANDLE_BYTES, MAX_RANKS, PeerReducer

logger = logging.getLogger(__name__)

TRIAL_S = 20.0
_SMALL = 16384


def connect_peers(device: torch.device, rank: int, ranks: int) -> PeerReducer | None:
    """Make this rank's side of the launches and try them once; None on all ranks where they do not work between all.

    All ranks of the process group call it at the same time. NCCL_P2P_DISABLE=1 switches peer access off here, too.
    """
    why = _unusable(ranks)
    peers: PeerReducer | None = None
    if why is None:
        try:
            peers = PeerReducer(device, rank, ranks)
        except KernelError as e:
            why = str(e)
    handles = _gathered(peers.handle if peers is not None else bytes(HANDLE_BYTES), ranks)
    if _all(why is None) and peers is not None:
        try:
            peers.open(handles)
        except KernelError as e:
            why = str(e)
        if _all(why is None):
            why = _tried(peers)
            if _all(why is None):
                return peers
    if why is not None:
        logger.info("rank %d: small tensors are exchanged by NCCL as all others are: %s", rank, why)
    # All ranks wait here, including those without an IPC buffer, so that no rank writes to one that is gone.
    _all(True)
    if peers is not None:
        peers.close()
    return None


def _unusable(ranks: int) -> str | None:
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE is 1"
    if ranks > MAX_RANKS:
        return f"{ranks} ranks, of {MAX_RANKS} at most"
    return cuda.load_error()


def _tried(peers: PeerReducer) -> str | None:
    """Fault of sums over the ranks; None if they are right."""
    peers.set_timeout(TRIAL_S)
    # Both protocols, and all thread blocks in both slots of an IPC buffer, which they take in turn.
    most = peers.max_bytes
    for bytes_ in (_SMALL, most, most, _SMALL):
        given = torch.arange(bytes_ // 2, device=peers.device, dtype=torch.int32) % 64
        x = (given + peers.rank).to(torch.bfloat16)
        peers.all_reduce(x, given.to(torch.bfloat16), fatal=False)
        silent = peers.hung_rank()
        if silent is not None:
            return f"nothing came from rank {silent}"
        # Whole numbers up to 256 are exact in bfloat16, those up to 1024 are rounded as here.
        right = (given * (peers.ranks + 1) + peers.ranks * (peers.ranks - 1) // 2).to(torch.bfloat16)
        if not torch.equal(x, right):
            return "sums are wrong"
    return None


def _gathered(own: bytes, ranks: int) -> list[bytes]:
    tensors = [torch.empty(len(own), dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(tensors, torch.frombuffer(bytearray(own), dtype=torch.uint8))
    return [bytes(tensor.tolist()) for tensor in tensors]


def _all(success: bool) -> bool:
    found = torch.tensor([int(success)])
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)
