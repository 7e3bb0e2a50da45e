"""The kernels of sampling in Triton's interpreter, which needs no GPU, where Triton is installed."""

from __future__ import annotations

import pytest

from tests.engine.interpreted import run_interpreted

pytest.importorskip("triton")

TRIALS = """
import torch
from server.engine.runtime.sampling import ops, triton_ops
for vocabulary in (31, 4096, 5003):
    for trial in ops.trials(triton_ops, torch.device("cpu"), torch.bfloat16, vocabulary):
        trial()
"""
LARGEST = """
import torch
from server.engine.runtime.sampling import ops, triton_ops
from tests.engine.sampling import test_largest
ops._kernels["cpu"] = triton_ops
for shape in ((1, 9), (5, 8192), (6, 20_001)):
    test_largest.check_rows(*shape, torch.bfloat16, "cpu")
"""


@pytest.mark.parametrize("code", [TRIALS, LARGEST], ids=["trials", "largest"])
def test_the_kernels_compute_what_torch_computes(code: str) -> None:
    run_interpreted(code)
