"""vLLM's plugin on a GPU: the parent that vLLM forks leaves CUDA alone, and a forked worker's GEMMs are these kernels'."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

WORKER = """
import logging, os, sys
import torch
from nf4_kernels import vllm_plugin
logging.basicConfig(level=logging.INFO, format="%(message)s")
vllm_plugin.register()
assert not torch.cuda.is_initialized()
if worker := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
import bitsandbytes as bnb
from torch.profiler import ProfilerActivity, profile
import nf4_kernels
weight = torch.randn(3072, 1024, dtype=torch.bfloat16, device="cuda")
packed, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
for tokens in (1, 8, 100, 2048):
    x = torch.randn(tokens, 1024, dtype=torch.bfloat16, device="cuda")
    out = bnb.matmul_4bit(x, packed.t(), state)  # as vLLM calls it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = bnb.matmul_4bit(x, packed.t(), state)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, out)
    exact = x.double() @ bnb.functional.dequantize_4bit(packed, state).double().t()
    assert (out - exact).norm() < 4e-3 * exact.norm()
x = x[:1].contiguous()
with profile(activities=[ProfilerActivity.CUDA]) as profiled:
    bnb.matmul_4bit(x, packed.t(), state)
    torch.cuda.synchronize()
kernels = " ".join(event.key for event in profiled.key_averages())
assert "linear_rows" in kernels or "linear_mma" in kernels, kernels
nf4_kernels.disable()
theirs = bnb.matmul_4bit(x, packed.t(), state)
assert (theirs - out[:1]).norm() < 1e-2 * theirs.norm()
print("done")
"""


def test_a_forked_worker_computes_by_the_kernels() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr
    assert done.stderr.count("NF4 layers run on nf4_kernels") == 1
