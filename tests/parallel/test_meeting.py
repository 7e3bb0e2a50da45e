"""Meeting of ranks that sum in one launch: all of them do or none does. On one GPU, which their processes share in turns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nf4_kernels.cuda.cuda_weights import ON_GPU
from tests.parallel.meeting_rank import WITHOUT

pytestmark = [*ON_GPU, pytest.mark.timeout(240)]


def test_all_ranks_or_none(tmp_path: Path) -> None:
    # Where a process sees several GPUs, NVLink may link them, which says nothing of one GPU's memory.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.meeting_rank", str(rank), "2", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": gpu},
        )
        for rank in (0, 1)
    ]
    try:
        for rank, process in enumerate(processes):
            said, _ = process.communicate(timeout=200)
            found = ["alone" if without else "together" for without in WITHOUT]
            assert [line for line in said.splitlines() if line in found] == found, f"rank {rank}: {said}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
