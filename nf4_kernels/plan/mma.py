"""linear_mma: which launches a GPU without wgmma can do for a GEMM, and what they cost.

Launches of wide tiles, for more than 64 tokens, are in mma_wide.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nf4_kernels.plan.limits import COUNTERS, NORM_K

TILE_ROWS = 256
"""Weight rows of a tile."""
K_STEP = 64
"""k of a step, the unit of work that stream-K hands out."""
MMA_TOKENS = range(1, 257)
"""With more tokens weights had better be dequantized."""
# The instances of csrc/cuda/mma_sm80/instances.cuh, by warps and the tokens of a tile -> a launch without any k step, a k
# step, and what parts of two tiles in one thread block add, in microseconds of code for sm_86, fitted to
# bench/results/posed-86-nvidia-h200.json.
MMA_COSTS = {
    (8, 8): (7.4, 0.46, 2.1),
    (8, 16): (7.2, 0.538, 1.9),
    (8, 24): (7.1, 0.688, 2.0),
    (8, 32): (7.6, 0.704, 2.9),
    (8, 48): (7.8, 0.956, 4.1),
    (8, 64): (8.3, 1.1, 4.5),
}
_WIDE_TOKENS = 80
_MIN_STEPS = 2
"""k steps of a thread block, if it has parts of one tile only: fewer are not faster."""


class WholeInstance(NamedTuple):
    """An instance of csrc/cuda/mma_sm80/whole/, and its costs in microseconds, fitted as MMA_COSTS are."""

    row_tiles: int
    """16 weight rows each, of a warp."""
    max_k_warps: int
    """Warps that can share the k of the same rows: their activations must fit a part of the ring."""
    launch: float
    tile: float
    """What each tile of a thread block but the first one adds."""
    step: float
    """256 k of each k warp."""
    rows: float
    """256 k of 16 rows, beyond the first _BUSY_TILES that are under way."""
    copy: float
    """5e7 activations that all thread blocks copy."""


# By the most warps of a thread block and the tokens of a tile.
WHOLE_INSTANCES = {
    (16, 8): WholeInstance(1, 8, 4.06, 1.42, 0.817, 0.102, 8.04),
    (15, 8): WholeInstance(2, 8, 4.13, 1.06, 0.727, 0.102, 11.2),
    (16, 16): WholeInstance(1, 8, 4.55, 1.88, 0.842, 0.122, 5.47),
    (12, 16): WholeInstance(2, 4, 4.64, 1.70, 0.961, 0.101, 5.88),
    (16, 24): WholeInstance(1, 5, 4.10, 1.14, 1.02, 0.139, 5.26),
    (8, 24): WholeInstance(2, 5, 5.43, 2.59, 1.14, 0.094, 4.84),
    (16, 32): WholeInstance(1, 4, 4.28, 1.21, 1.09, 0.163, 4.76),
    (8, 32): WholeInstance(2, 4, 5.76, 2.80, 1.43, 0.085, 3.13),
    (16, 48): WholeInstance(1, 4, 5.66, 1.60, 1.53, 0.204, 3.89),
    (8, 48): WholeInstance(2, 2, 7.44, 4.48, 1.46, 0.128, 4.19),
    (16, 64): WholeInstance(1, 4, 6.63, 2.58, 2.08, 0.205, 2.30),
    (8, 64): WholeInstance(2, 2, 10.3, 7.03, 1.76, 0.121, 5.12),
    (8, 80): WholeInstance(2, 1, 9.38, 5.31, 2.35, 0.154, 2.51),
    (8, 96): WholeInstance(2, 1, 8.18, 5.10, 3.01, 0.122, 4.46),
}
_MAX_TOKEN_TILES = 8
"""Of a launch of whole tiles. Small weights have too few rows for all multiprocessors."""
_BUSY_TILES = 6
"""m16 tiles that are under way at no cost."""
_LOADERS = (4, 2, 1)
_LOADER_K_WARPS = 2
"""For more warps with k of their own a loader is too slow."""


@dataclass(frozen=True)
class Mma:
    """linear_mma: weights decoded into mma.sync's register operand; the fields are MmaPlan of params.h.

    warps: those of a thread block if tiles are split, else the most that the instance can have; of wide tiles (wide/), which
    have 80 tokens and more, the m16 tiles of each of its 8 warps. row_warps, k_warps, loaders: of a thread block that
    computes whole tiles (csrc/cuda/mma_sm80/whole/).
    """

    tokens: int
    warps: int
    grid: int
    row_warps: int = 0
    k_warps: int = 0
    loaders: int = 0

    @property
    def tile_rows(self) -> int:
        """Weight rows of a tile."""
        if self.is_wide:
            return self.warps * 64
        if not self.row_warps:
            return TILE_ROWS
        return self.row_warps * WHOLE_INSTANCES[self.warps, self.tokens].row_tiles * 16

    @property
    def is_wide(self) -> bool:
        """Whether it is one of csrc/cuda/mma_sm80/wide/."""
        return not self.row_warps and self.tokens >= _WIDE_TOKENS

    def workspace_bytes(self, m: int, n: int, k: int) -> int:
        """Normalised tokens, should there be any, and partial sums of the tiles of which thread blocks may have a part."""
        norm = -(-m * k * 2 // 256) * 256 if k <= NORM_K else 0
        if self.is_wide:
            return norm + self.grid * self.tile_rows * self.tokens * 4
        return norm + (self.grid * 2 * TILE_ROWS * self.tokens * 4 if not self.row_warps else 0)

    def __str__(self) -> str:
        kind = f"{8 if self.is_wide else self.warps} warps"
        if self.row_warps:
            kind = f"{self.row_warps} x {self.k_warps} + {self.loaders} of {kind}"
        return f"mma: {self.tokens} tokens x {self.tile_rows} rows, {kind}, grid {self.grid}"


def mma_candidates(m: int, n: int, k: int, multiprocessors: int) -> Iterator[Mma]:
    """Launches of whole tiles, and of stream-K.

    Of stream-K's the smallest instances with one or two token tiles, on all multiprocessors; and if there are enough of
    them, with as many thread blocks for each tile.
    """
    yield from _whole_candidates(m, n, k, multiprocessors)
    seen = set()
    for warps, tokens in MMA_COSTS:
        token_tiles = -(-m // tokens)
        tiles = -(-n // TILE_ROWS) * token_tiles
        if token_tiles not in seen and token_tiles <= 2 and tiles <= COUNTERS:
            seen.add(token_tiles)
            steps = k // K_STEP
            if tiles <= multiprocessors:
                yield Mma(tokens, warps, tiles * min(multiprocessors // tiles, max(1, steps // _MIN_STEPS)))
            yield Mma(tokens, warps, min(multiprocessors, tiles * steps))


def _whole_candidates(m: int, n: int, k: int, multiprocessors: int) -> Iterator[Mma]:
    """By the smallest instances with room for all tokens in one or more token tiles.

    Of launches with as many tiles a thread block, those of the fewest rows; with at least half the k warps that fit.
    """
    sizes = sorted({tokens for _, tokens in WHOLE_INSTANCES})
    token_tiles = {next((t for t in sizes if t * some >= m), 0): some for some in range(_MAX_TOKEN_TILES, 0, -1)}
    for (warps, tokens), instance in WHOLE_INSTANCES.items():
        tiles_of_block = 0
        for row_warps in range(1, warps) if tokens in token_tiles else ():
            tiles = -(-n // (row_warps * instance.row_tiles * 16)) * token_tiles[tokens]
            if tiles_of_block == (tiles_of_block := -(-tiles // multiprocessors)):
                continue
            most = min((warps - 1) // row_warps, instance.max_k_warps)
            for k_warps in {_fewest_k_warps(k, some) for some in range((most + 1) // 2, most + 1)}:
                loaders = next(some for some in _LOADERS if row_warps * k_warps + some <= warps)
                if k_warps <= _LOADER_K_WARPS * loaders:
                    yield Mma(tokens, warps, -(-tiles // tiles_of_block), row_warps, k_warps, loaders)


def _fewest_k_warps(k: int, k_warps: int) -> int:
    """Warps that take no more steps than k_warps do."""
    steps = -(-k // (K_STEP * 4 * k_warps))
    return -(-k // (K_STEP * 4 * steps))


def mma_cost(mma: Mma, m: int, n: int, k: int) -> float:
    """Estimate microseconds of a launch on those GPUs."""
    if mma.row_warps:
        instance = WHOLE_INSTANCES[mma.warps, mma.tokens]
        under_way = mma.row_warps * mma.k_warps * instance.row_tiles
        tiles = -(-(-(-n // mma.tile_rows) * -(-m // mma.tokens)) // mma.grid)
        step = instance.step + instance.rows * max(0, under_way - _BUSY_TILES)
        copied = mma.grid * tiles * mma.tokens * k
        steps = tiles * math.ceil(k / (K_STEP * 4 * mma.k_warps))
        return instance.launch + instance.tile * (tiles - 1) + step * steps + instance.copy * copied / 5e7
    tiles, steps = -(-n // TILE_ROWS) * -(-m // mma.tokens), k // K_STEP
    launch, step, two_tiles = MMA_COSTS[mma.warps, mma.tokens]
    if mma.grid % tiles == 0:
        return launch + step * max(_MIN_STEPS, math.ceil(steps / (mma.grid // tiles)))
    return launch + step * math.ceil(tiles * steps / mma.grid) + two_tiles
