"""Which tests need a GPU; fresh random NF4 weights there, and how far a product may be from the oracle's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from nf4_kernels import cuda, reference
from nf4_kernels.plan import Wgmma

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda.load_error() is not None, reason=f"CUDA kernels: {cuda.load_error()}"),
]
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper's wgmma"
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

    n: int
    k: int
    blocksize: int
    packed: torch.Tensor
    absmax: torch.Tensor
    nested: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

    def exact(self) -> torch.Tensor:
        """The weight in float64."""
        shape = (self.n, self.k)
        return reference.dequantize(
            self.packed, shape, self.absmax, self.blocksize, torch.float32, *self.nested
        ).double()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return cuda.linear(x, self.packed, (self.n, self.k), self.absmax, self.blocksize, bias, *self.nested)


def random_weight(n: int, k: int, blocksize: int = 64, nested: bool = True, offsets: bool = False) -> Random:
    """A fresh weight on the GPU; offsets: every 256 blocks have one of their own."""
    blocks = -(-n * k // blocksize)
    packed = torch.randint(0, 256, ((n * k + 1) // 2, 1), dtype=torch.uint8, device=DEVICE)
    if not nested:
        return Random(n, k, blocksize, packed, torch.rand(blocks, device=DEVICE) + 0.01, (None, None, None))
    codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device=DEVICE)
    table = torch.randn(256, device=DEVICE).sort().values
    absmax = torch.rand(-(-blocks // 256), device=DEVICE)
    offset = torch.randn_like(absmax) * 3 if offsets else torch.tensor(3.0, device=DEVICE)
    return Random(n, k, blocksize, packed, absmax, (codes, table, offset))


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def cut(tokens: int, groups: int, m: int, n: int, k: int, blocks: int, owner_steps: int) -> Wgmma:
    """A linear_wgmma launch of so many blocks, no more than there is work, or with owner_steps of so many for each tile."""
    tiles = -(-n // (groups * 64)) * -(-m // tokens)
    return Wgmma(tokens, groups, tiles * blocks if owner_steps else min(blocks, tiles * -(-k // 256)), owner_steps)
