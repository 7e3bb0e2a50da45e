"""One rank of test_meeting.py: `python -m tests.parallel.meeting_rank RANK RANKS STORE` prints what it has found."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from nf4_kernels.cuda.peers import max_bytes
from server.engine.runtime import exchange
from server.engine.runtime.peers import connect_peers

WITHOUT: tuple[tuple[int, ...], ...] = ((), (1,), (0, 1))
"""By meeting, the ranks that have peer access switched off."""


def main() -> None:
    """The process groups are gloo's alone: NCCL takes no two ranks with one GPU."""
    rank, ranks = int(sys.argv[1]), int(sys.argv[2])
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    for meeting, without in enumerate(WITHOUT):
        os.environ["NCCL_P2P_DISABLE"] = str(int(rank in without))
        store = torch._C._distributed_c10d.FileStore(f"{sys.argv[3]}-{meeting}", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        exchange._Process.membership = exchange.Membership(rank, ranks, sys.argv[3])
        exchange._Process.peers = connect_peers(device, rank, ranks)
        if exchange._Process.peers is not None:
            check(device, rank, ranks)
        print("alone" if exchange._Process.peers is None else "together")
        exchange.leave()


def check(device: torch.device, rank: int, ranks: int) -> None:
    """Sum tensors that one launch can sum."""
    assert exchange.max_launch_bytes() in (max_bytes(ranks, False), max_bytes(ranks, True))
    exchange.set_timeout(60.0)
    with torch.inference_mode():
        for tokens in (1, 7, 24):
            # Dense and aligned, a view that is not dense, one that is not aligned.
            wides = torch.full((3, tokens, 5128), float(rank + 1), device=device, dtype=torch.bfloat16)
            for x in (wides[0, :, :5120].contiguous(), wides[1, :, :5120], wides[2].view(-1)[1 : 1 + 4096]):
                residual = torch.full_like(x, 0.5)
                exchange.all_reduce(x, residual)
                assert bool((x == ranks * (ranks + 1) / 2 + 0.5).all())
                exchange.all_reduce(residual)
                assert bool((residual == 0.5 * ranks).all())


if __name__ == "__main__":
    main()
