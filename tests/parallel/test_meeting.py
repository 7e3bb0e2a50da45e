"""Meeting of ranks that sum in one launch: all of them do or none does. On one GPU, which their processes share in turns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nf4_kernels.cuda.cuda_weights import ON_GPU

pytestmark = [*ON_GPU, pytest.mark.timeout(240)]


@pytest.mark.parametrize(("without", "found"), [((), "together"), ((1,), "alone"), ((0, 1), "alone")])
def test_all_ranks_or_none(without: tuple[int, ...], found: str, tmp_path: Path) -> None:
    """without: ranks that have peer access switched off."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.meeting_rank", str(rank), "2", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": str(int(rank in without))},
        )
        for rank in (0, 1)
    ]
    try:
        for rank, process in enumerate(processes):
            said, _ = process.communicate(timeout=200)
            assert found in said.splitlines(), f"rank {rank}: {said}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
