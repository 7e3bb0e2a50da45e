"""Mark of tests that need a GPU; fresh random NF4 weights there, and how far a GEMM may be from the oracle's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from nf4_kernels import Weight, cuda, reference
from nf4_kernels.cuda.device import arch, capability
from nf4_kernels.plan import Wgmma

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda.load_error() is not None, reason=f"CUDA kernels: {cuda.load_error()}"),
]
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or capability(torch.device("cuda")) != (9, 0), reason="needs Hopper's wgmma"
)
HAS_ROWS = pytest.mark.skipif(
    not torch.cuda.is_available() or not 90 <= arch(torch.device("cuda")) < 120, reason="has no linear_rows"
)
DEVICE = torch.device("cuda")
# bfloat16 and float16: rounding of codes and outputs; far above it lies any wrong index.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5}


def gpu(test: object) -> object:
    """The test with all of ON_GPU."""
    for mark in ON_GPU:
        test = mark(test)
    return test


@dataclass(frozen=True)
class Random:
    """Random codes and scales: any bit pattern is a valid NF4 weight."""

    weight: Weight

    @property
    def n(self) -> int:
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        return self.weight.shape[1]

    def exact(self) -> torch.Tensor:
        """The weight in float64."""
        return reference.dequantize(self.weight, torch.float32).double()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return cuda.linear(x, self.weight, bias)


def random_weight(n: int, k: int, blocksize: int = 64, nested: bool = True, offsets: bool = False) -> Random:
    """A fresh weight on the GPU; offsets: every 256 blocks have one of their own."""
    blocks = -(-n * k // blocksize)
    packed = torch.randint(0, 256, ((n * k + 1) // 2, 1), dtype=torch.uint8, device=DEVICE)
    if not nested:
        return Random(Weight(packed, (n, k), torch.rand(blocks, device=DEVICE) + 0.01, blocksize))
    codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device=DEVICE)
    table = torch.randn(256, device=DEVICE).sort().values
    absmax = torch.rand(-(-blocks // 256), device=DEVICE)
    offset = torch.randn_like(absmax) * 3 if offsets else torch.tensor(3.0, device=DEVICE)
    return Random(Weight(packed, (n, k), absmax, blocksize, codes, table, offset))


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def split(tokens: int, groups: int, m: int, n: int, k: int, blocks: int, first_steps: int) -> Wgmma:
    """A linear_wgmma launch: stream-K of that many blocks, no more than there are k steps; or with first_steps split-K.

    Split-K: that many blocks for each tile, the first of which has first_steps of its k steps.
    """
    tiles = -(-n // (groups * 64)) * -(-m // tokens)
    return Wgmma(tokens, groups, tiles * blocks if first_steps else min(blocks, tiles * -(-k // 256)), first_steps)
