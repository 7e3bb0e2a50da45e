"""linear_mma's launches of 65 to 256 tokens (csrc/cuda/mma_sm80/wide/), and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nf4_kernels.plan.limits import COUNTERS
from nf4_kernels.plan.mma import K_STEP, Mma

WIDE_TOKENS = range(65, 257)
"""With more tokens weights had better be dequantized; with fewer, smaller tiles are faster."""
# The instances of csrc/cuda/mma_sm80/wide/, by the m16 tiles of a warp and the tokens of a tile -> a launch, a k step, and
# what split tiles add, in microseconds of code for sm_86, fitted to wide_tiles of bench/results/posed-86-nvidia-h200.json.
WIDE_COSTS = {
    (4, 80): (3.8, 1.15, 7.5),
    (4, 96): (2.9, 1.31, 8.5),
    (4, 112): (3.9, 1.42, 8.9),
    (4, 128): (1.6, 1.575, 11.8),
}
_MIN_STEPS = 4
"""k steps of a thread block that has a part of a tile."""


def wide_candidates(m: int, n: int, k: int, multiprocessors: int) -> Iterator[Mma]:
    """Launches with as few token tiles as there can be, by the smallest tile that has room for these.

    Tiles are whole; and if there are fewer than multiprocessors, also divided among all of them.
    """
    token_tiles = -(-m // max(tokens for _, tokens in WIDE_COSTS))
    tokens = min(tokens for _, tokens in WIDE_COSTS if tokens * token_tiles >= m)
    for row_tiles in sorted({row_tiles for row_tiles, _ in WIDE_COSTS}):
        tiles = -(-n // Mma(tokens, row_tiles, 1).tile_rows) * token_tiles
        parts = min(multiprocessors // tiles, k // K_STEP // _MIN_STEPS)
        yield Mma(tokens, row_tiles, tiles)
        if parts > 1 and tiles <= COUNTERS:
            yield Mma(tokens, row_tiles, tiles * parts)


def wide_cost(mma: Mma, m: int, n: int, k: int, multiprocessors: int) -> float:
    """Estimate microseconds of a launch on those GPUs."""
    tiles = -(-n // mma.tile_rows) * -(-m // mma.tokens)
    launch, step, split = WIDE_COSTS[mma.warps, mma.tokens]
    parts = mma.grid // tiles
    waves = math.ceil(mma.grid / multiprocessors)
    return launch * waves + step * math.ceil(k / K_STEP / parts) * waves + split * (parts > 1)
