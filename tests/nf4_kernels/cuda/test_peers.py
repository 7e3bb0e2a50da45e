"""Sums over ranks in one launch: on one GPU, which the ranks' processes share in turns, and on several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nf4_kernels.cuda.peers import HANDLE_BYTES, LL_BYTES, MAX_RANKS, PeerReducer
from tests.nf4_kernels.cuda.cuda_weights import DEVICE, ON_GPU

pytestmark = [*ON_GPU, pytest.mark.timeout(240)]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
FOUR_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")


def run(folder: Path, ranks: int, gpus: int, what: str, leaving: int = 0) -> None:
    """Have ranks do something, but for the last `leaving` ones, which are ended; each rank has a GPU of gpus."""
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.nf4_kernels.cuda.peer_ranks"),
                *(str(rank), str(ranks), str(rank % gpus), str(folder), what),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        for rank, process in enumerate(processes[: ranks - leaving]):
            said, _ = process.communicate(timeout=200)
            assert "right" in said.splitlines(), f"rank {rank}: {said}"
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("what", ["sums", "many", "graphs", "unlike"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_a_gpu(ranks: int, what: str, tmp_path: Path) -> None:
    run(tmp_path, ranks, 1, what)


@pytest.mark.parametrize("what", ["sums", "many", "graphs"])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=TWO_GPUS), pytest.param(4, marks=FOUR_GPUS)])
def test_ranks_with_a_gpu_each(ranks: int, what: str, tmp_path: Path) -> None:
    run(tmp_path, ranks, ranks, what)


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=TWO_GPUS)])
def test_a_rank_that_does_not_come_is_named_and_nothing_hangs(gpus: int, tmp_path: Path) -> None:
    run(tmp_path, 2, gpus, "silent", leaving=1)


def test_what_it_does_not_take_is_named() -> None:
    with pytest.raises(ValueError, match="there must be 2 to 8 ranks"):
        PeerReducer(DEVICE, 0, MAX_RANKS + 1)
    peers = PeerReducer(torch.device("cuda", torch.cuda.current_device()), 0, 2, ll128=False)
    x = torch.zeros(LL_BYTES // 2 + 8, dtype=torch.bfloat16, device=peers.device)
    assert not peers.takes(x)
    assert peers.takes(x[8:])
    assert not peers.takes(x[1:9])
    assert not peers.takes(x[:3])
    with pytest.raises(ValueError, match="x must be dense"):
        peers.all_reduce(x)
    with pytest.raises(ValueError, match=r"residual must be torch\.bfloat16"):
        peers.all_reduce(x[:8], x[:8].float())
    with pytest.raises(ValueError, match="have not been opened"):
        peers.all_reduce(x[:8])
    with pytest.raises(ValueError, match="LL128 is not used here"):
        peers.all_reduce(x[:8], ll128=True)
    with pytest.raises(ValueError, match=f"2 handles of {HANDLE_BYTES} bytes"):
        peers.open([b""])
    peers.close()
