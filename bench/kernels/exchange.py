"""Sums over the GPUs of this host, in CUDA graphs: NCCL's beside nf4_kernels.cuda.peers': python -m bench.kernels.exchange.

One process for each GPU. Writes bench/results/exchange-<device>.json, of more than two GPUs
exchange-<number>-gpus-<device>.json: microseconds of one sum of bfloat16 in a chain of 100, the slowest rank's, by
bytes; with the residual, which NCCL's sum needs another launch for; ours in LL and, where there is NVLink, in LL128.
NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from bench.machine import current_commit, gpu_in_file_names, versions
from nf4_kernels.cuda.peers import PeerReducer, max_bytes
from server.engine.runtime.exchange import ENVIRONMENT
from server.engine.runtime.peers import connect_peers

RESULTS = Path(__file__).parents[1] / "results"
KILOBYTES = (2, 8, 16, 40, 64, 80, 120, 160, 256, 320, 480, 640, 1000, 1280, 2048, 3000, 5120, 7680)
CHAIN, REPLAYS, ROUNDS = 100, 20, 5


def _microseconds(exchange: Callable[[], None]) -> float:
    """Microseconds of one exchange in a graph of CHAIN: each rank's least of ROUNDS, and of these the largest."""
    exchange()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CHAIN):
            exchange()
    best = float("inf")
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / REPLAYS / CHAIN)
    found = torch.tensor([best])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _measure(peers: PeerReducer, kilobytes: int, residual: bool) -> dict[str, float]:
    x, added = (torch.zeros(kilobytes * 512, dtype=torch.bfloat16, device=peers.device) for _ in range(2))

    def nccl() -> None:
        dist.all_reduce(x)
        if residual:
            x.add_(added)

    def ours(ll128: bool) -> None:
        peers.all_reduce(x, added if residual else None, ll128=ll128)

    row = {"kib": kilobytes, "residual": residual, "nccl_us": _microseconds(nccl)}
    for name, ll128 in (("ll_us", False), ("ll128_us", True)):
        if x.nbytes <= max_bytes(peers.ranks, ll128) <= peers.max_bytes:
            row[name] = _microseconds(partial(ours, ll128))
    return row


def _rank(rank: int, ranks: int, store: str, path: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    held = torch._C._distributed_c10d.FileStore(store, ranks)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=held, rank=rank, world_size=ranks, device_id=device)
    peers = connect_peers(device, rank, ranks)
    if peers is None:
        raise SystemExit("these GPUs do not reach one another")
    peers.set_timeout(60.0)
    rows = []
    with torch.inference_mode():
        for kilobytes in KILOBYTES:
            for residual in (False, True):
                rows.append({"ranks": ranks, **_measure(peers, kilobytes, residual)})
                if rank == 0:
                    print(json.dumps(rows[-1]), flush=True)
    if rank == 0:
        device_name = gpu_in_file_names()
        result = {"device": device_name, "versions": versions(), "commit": current_commit(), "rows": rows}
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
    os._exit(0)  # the end of NCCL would wait for ranks that have ended


def main() -> None:
    """Measure with as many GPUs as asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.exchange", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the file that rows go to")
    options = parser.parse_args()
    if options.ranks > torch.cuda.device_count():
        parser.error(f"{options.ranks} ranks need as many GPUs; there are {torch.cuda.device_count()}")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    device = gpu_in_file_names()
    gpus = "" if options.ranks == 2 else f"{options.ranks}-gpus-"
    path = options.out or RESULTS / f"exchange-{gpus}{device}.json"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, str(Path(folder) / "store"), str(path))
        spawn(_rank, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
