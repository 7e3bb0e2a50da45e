"""A rank of test_peers.py: `python -m tests.nf4_kernels.cuda.peer_ranks RANK RANKS DEVICE FOLDER WHAT` says "right"."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from nf4_kernels.cuda.library import KernelError
from nf4_kernels.cuda.peers import PeerReducer, max_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A chunk, what a warp and a thread block have in each protocol, several of these, all that one launch takes (-1), and odd
# numbers of chunks between.
BYTES = (16, 32, 528, 960, 976, 2048, 2064, 3840, 8192, 10240, 81920, 160 * 1024 + 16, 999_984, 2_097_152, -1)
TIMEOUT_S = 1.0


def inputs(ranks: int, step: int, bytes_: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Tensors that every rank has in a step, and a residual; on CPU, the same in all processes."""
    generator = torch.Generator().manual_seed(step)
    count = bytes_ // dtype.itemsize
    *xs, residual = (torch.randn(count, generator=generator).to(dtype) for _ in range(ranks + 1))
    return xs, residual


def expected(xs: Sequence[torch.Tensor], residual: torch.Tensor | None) -> torch.Tensor:
    """The sum, in float32, in the order of the ranks, behind the residual; rounded once."""
    total = torch.zeros(xs[0].shape) if residual is None else residual.float()
    for x in xs:
        total += x.float()
    return total.to(xs[0].dtype)


def sizes(peers: PeerReducer) -> list[int]:
    """Bytes of the tensors."""
    most = peers.max_bytes
    return [most if bytes_ < 0 else min(bytes_, most) for bytes_ in BYTES]


def sums(peers: PeerReducer) -> None:
    """Launches of all sizes, one after another: thread blocks that take part in few of them count other epochs."""
    rng = random.Random(0)
    for step in range(120):
        dtype, bytes_ = rng.choice(DTYPES), rng.choice(sizes(peers))
        protocols = (None, True, False) if peers.max_bytes > max_bytes(peers.ranks, False) else (None, False)
        ll128 = rng.choice(protocols) if bytes_ <= max_bytes(peers.ranks, False) else None
        xs, residual = inputs(peers.ranks, step, bytes_, dtype)
        added = residual if rng.random() < 0.5 else None
        x = xs[peers.rank].to(peers.device)
        peers.all_reduce(x, None if added is None else added.to(peers.device), ll128=ll128)
        assert torch.equal(x.cpu(), expected(xs, added)), (step, dtype, bytes_, added is None, ll128)


def many(peers: PeerReducer) -> None:
    """Several hundred launches without a look at the results in between."""
    steps = sizes(peers) * 4
    given = [inputs(peers.ranks, step, bytes_, torch.bfloat16) for step, bytes_ in enumerate(steps)]
    for _ in range(5):
        outs = [xs[peers.rank].to(peers.device) for xs, _ in given]
        residuals = [residual.to(peers.device) for _, residual in given]
        torch.cuda.synchronize()
        for x, residual in zip(outs, residuals, strict=True):
            peers.all_reduce(x, residual)
        for x, (xs, residual) in zip(outs, given, strict=True):
            assert torch.equal(x.cpu(), expected(xs, residual))


def graphs(peers: PeerReducer) -> None:
    """A captured chain: half of each sum is what the next one adds up."""
    width = 5120

    def chain(x: torch.Tensor, residual: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for tokens in (1, 8, 3, 16, 1, 25, 2):
            y = x[:tokens] * 0.5
            held = residual[:tokens].clone()
            peers.all_reduce(y, held)
            found.append(y)
            x = torch.cat([y, x[tokens:]])
        return found

    def on_host(xs: list[torch.Tensor], residual: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for tokens in (1, 8, 3, 16, 1, 25, 2):
            y = expected([x[:tokens] * 0.5 for x in xs], residual[:tokens])
            found.append(y)
            xs = [torch.cat([y, x[tokens:]]) for x in xs]
        return found

    x, residual = (torch.zeros(25, width, dtype=torch.bfloat16, device=peers.device) for _ in range(2))
    chain(x, residual)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = chain(x, residual)
    for step in range(20):
        xs, added = inputs(peers.ranks, step, x.nbytes, x.dtype)
        xs = [each.view(x.shape) for each in xs]
        x.copy_(xs[peers.rank])
        residual.copy_(added.view(x.shape))
        graph.replay()
        for got, right in zip(outs, on_host(xs, added.view(x.shape)), strict=True):
            assert torch.equal(got.cpu(), right), step


def silent(peers: PeerReducer) -> None:
    """The last rank does not come: the others go on without it, or fail, as they were asked to, within their timeout."""
    if peers.rank == peers.ranks - 1:
        time.sleep(600)
    x = torch.ones(4096, device=peers.device)
    peers.set_timeout(TIMEOUT_S)
    for fatal in (False, True):
        began = time.monotonic()
        peers.all_reduce(x, fatal=fatal)
        try:
            found = peers.hung_rank()
            assert not fatal
            assert found == peers.ranks - 1
        except (RuntimeError, KernelError):
            assert fatal
        assert TIMEOUT_S * 0.9 < time.monotonic() - began < TIMEOUT_S + 5


def meet(peers: PeerReducer, folder: Path) -> None:
    """Exchange handles through files."""
    own = folder / f"{peers.rank}.part"
    own.write_bytes(peers.handle)
    own.rename(folder / f"{peers.rank}.handle")
    others = [folder / f"{rank}.handle" for rank in range(peers.ranks)]
    while not all(path.exists() for path in others):
        time.sleep(0.01)
    peers.open([path.read_bytes() for path in others])
    (folder / f"{peers.rank}.open").touch()
    while not all(path.with_suffix(".open").exists() for path in others):
        time.sleep(0.01)


def main() -> None:
    rank, ranks, device = (int(argument) for argument in sys.argv[1:4])
    torch.cuda.set_device(device)
    # Threads of all ranks' sums on the host would wait for one another.
    torch.set_num_threads(1)
    # 128 bytes of a warp arrive together within a GPU, too; "unlike": a rank has it otherwise, and none may use LL128.
    unlike = sys.argv[5] == "unlike"
    peers = PeerReducer(torch.device("cuda", device), rank, ranks, ll128=not (unlike and rank == ranks - 1))
    meet(peers, Path(sys.argv[4]))
    assert peers.max_bytes == max_bytes(ranks, not unlike)
    what = {"sums": sums, "unlike": sums, "many": many, "graphs": graphs, "silent": silent}[sys.argv[5]]
    with torch.inference_mode():
        what(peers)
    print("right", flush=True)


if __name__ == "__main__":
    main()
