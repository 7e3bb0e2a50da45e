"""linear_mma: which launches an Ampere or Ada GPU can do for a GEMM, and what they cost. For 1 to 128 tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nf4_kernels.plan.limits import COUNTERS, NORM_K

TILE_ROWS = 256
"""Weight rows of a tile."""
K_STEP = 64
"""k of a step, the unit of work that stream-K hands out."""
MMA_TOKENS = range(1, 129)
"""With more tokens dequantization + cuBLAS was measured to be faster."""
# The instances of csrc/cuda/mma_sm80/instances.cuh, by warps and the tokens of a tile -> a launch without any k step and a k
# step, in microseconds on an H100 that ran code for sm_86, fitted to bench/results/posed-86-nvidia-h100.json.
MMA_COSTS = {
    (8, 8): (7.6, 0.615),
    (8, 16): (7.6, 0.706),
    (8, 24): (7.8, 0.861),
    (8, 32): (8.0, 0.98),
    (8, 48): (8.7, 1.17),
    (8, 64): (9.2, 1.39),
    (8, 96): (11.2, 1.81),
}


@dataclass(frozen=True)
class Mma:
    """linear_mma: weights decoded into mma.sync's register operand; the fields are MmaPlan of params.h."""

    tokens: int
    warps: int
    grid: int

    def workspace_bytes(self, m: int, n: int, k: int) -> int:
        """Normalised tokens, should there be any, and partial sums of two tiles for each thread block."""
        norm = -(-m * k * 2 // 256) * 256 if k <= NORM_K else 0
        return norm + self.grid * 2 * TILE_ROWS * self.tokens * 4

    def __str__(self) -> str:
        return f"mma: {self.tokens} tokens x {TILE_ROWS} rows, {self.warps} warps, grid {self.grid}"


def mma_candidates(m: int, n: int, k: int, multiprocessors: int) -> Iterator[Mma]:
    """Of instances with as many token tiles the smallest, one or two tiles, on all multiprocessors."""
    seen = set()
    for warps, tokens in MMA_COSTS:
        token_tiles = -(-m // tokens)
        tiles = -(-n // TILE_ROWS) * token_tiles
        if token_tiles not in seen and token_tiles <= 2 and tiles <= COUNTERS:
            seen.add(token_tiles)
            yield Mma(tokens, warps, min(multiprocessors, tiles * (k // K_STEP)))


def mma_cost(mma: Mma, m: int, n: int, k: int) -> float:
    """Estimate microseconds of a launch on that H100."""
    steps = -(-n // TILE_ROWS) * -(-m // mma.tokens) * (k // K_STEP)
    launch, step = MMA_COSTS[mma.warps, mma.tokens]
    return launch + step * math.ceil(steps / mma.grid)
