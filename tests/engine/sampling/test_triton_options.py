"""The kernels for penalties, masks and sampling in Triton's interpreter, which needs no GPU, where Triton is installed."""

from __future__ import annotations

import pytest

from tests.engine.interpreted import run_interpreted

pytest.importorskip("triton")

OPTIONS = """
import torch
from server.engine.runtime.sampling import option_trials
from server.engine.runtime.sampling.device_options import DeviceOptions
for vocabulary in (31, 4096, 5003):
    option_trials._load(torch.device("cpu"), torch.bfloat16, vocabulary)
assert DeviceOptions.penalize_rows is not None
print("same")
"""
SAMPLER = """
import sys
import torch
from server.engine.runtime.sampling import option_trials
option_trials._load(torch.device("cpu"), torch.float32, 300)
import pytest
sys.exit(pytest.main(["-q", "tests/engine/sampling/test_sampler.py", "-k", "device_sampler or penalties_of"]))
"""


@pytest.mark.parametrize("code", [OPTIONS, SAMPLER], ids=["trials", "sampler"])
def test_the_kernels_compute_what_torch_computes(code: str) -> None:
    run_interpreted(code)
