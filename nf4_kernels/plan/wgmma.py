"""linear_wgmma: which launches a Hopper GPU can do for a GEMM, and what they cost. For more than a few tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nf4_kernels.plan.limits import COUNTERS

WGMMA_INSTANCES = (
    (16, 2),
    (16, 3),
    (32, 2),
    (32, 3),
    (64, 2),
    (64, 3),
    (96, 2),
    (128, 2),
    (160, 2),
    (192, 2),
    (224, 2),
    (256, 2),
)
"""(tokens of a tile, warpgroups): the instances of csrc/cuda/wgmma_sm90/instances.cuh; ordered by tokens."""
WGMMA_TOKENS = range(9, 1025)
K_STEP = 256
"""k of a step, the unit of work that stream-K hands out."""


@dataclass(frozen=True)
class Wgmma:
    """linear_wgmma: weights decoded into wgmma's register operand; the fields are WgmmaPlan of params.h."""

    tokens: int
    groups: int
    grid: int
    first_split_steps: int = 0
    """0: stream-K. Else every tile is split alike, and this is the number of k steps of the block that has its first one."""

    def workspace_bytes(self, m: int, n: int, k: int) -> int:
        """Tiled activations and partial sums of split tiles: WgmmaSizes of csrc/cuda/wgmma_sm90/launch.cuh."""
        token_tiles, rows = -(-m // self.tokens), self.groups * 64
        tiled = token_tiles * self.tokens * -(-k // K_STEP) * K_STEP * 2
        split = -(-n // rows) * token_tiles % self.grid != 0
        return tiled + split * self.grid * rows * self.tokens * 4

    def __str__(self) -> str:
        split = f", {self.first_split_steps} k steps in a tile's first part" if self.first_split_steps else ""
        return f"wgmma: {self.tokens} tokens x {self.groups * 64} rows, grid {self.grid}{split}"


@dataclass(frozen=True)
class WgmmaCosts:
    """Microseconds of an instance's launches, as bench/kernels/fit_plan.py fits them to measured ones."""

    launch: float
    """A launch without any k step."""
    step: float
    """A k step: groups * 64 rows x tokens x 256 k."""
    step_more_tiles: float
    """What a k step takes longer for each token tile after the first; for all of these in tiles of over 128 tokens."""
    reduction_early: float
    """The reduction of a split tile whose partial sums are there when the reducing block comes to them."""
    reduction_late: float
    """The reduction of a split tile all of whose blocks end at the same time."""
    reduction_part: float
    """Added for each of a split tile's blocks beyond two."""
    step_away: float = 0.0
    """What a k step takes longer for each MB of activations beyond STAYING_BYTES, where blocks are at different k."""


STAYING_BYTES = 16e6
"""Activations that stay in L2 while blocks read them at different k."""

# Fitted on an H200 to 13 to 19 shapes and 16 to 512 tokens, for tiles of 256 tokens also to 4 shapes with 1024 tokens.
# What (64, 2) pays for a second token tile was raised later, by launches of 64, 100 and 128 tokens of 19 shapes.
# Tiles of 96, 160, 192 and 224 tokens are not fitted: their costs are in proportion to what the instances around them had
# before that.
WGMMA_COSTS = {
    (16, 2): WgmmaCosts(5.43, 0.738, 0.0, 2.31, 4.01, 0.183),
    (16, 3): WgmmaCosts(7.08, 1.072, 0.0, 0.24, 2.55, 0.393),
    (32, 2): WgmmaCosts(5.56, 0.860, 0.03, 2.16, 4.12, 0.291),
    (32, 3): WgmmaCosts(7.30, 1.252, 0.03, 0.72, 3.07, 0.390),
    (64, 2): WgmmaCosts(5.97, 1.152, 0.08, 2.44, 4.74, 0.529),
    (64, 3): WgmmaCosts(7.57, 1.658, 0.0, 1.26, 3.97, 0.765),
    (96, 2): WgmmaCosts(5.96, 1.439, 0.0493, 3.285, 5.87, 0.512),
    (128, 2): WgmmaCosts(5.95, 1.726, 0.0986, 4.13, 7.00, 0.495),
    (160, 2): WgmmaCosts(5.035, 2.0545, 0.145, 5.405, 8.6325, 0.6535, 0.0026),
    (192, 2): WgmmaCosts(4.12, 2.383, 0.1914, 6.68, 10.265, 0.812, 0.0053),
    (224, 2): WgmmaCosts(3.205, 2.7115, 0.2377, 7.955, 11.8975, 0.9705, 0.0079),
    (256, 2): WgmmaCosts(2.29, 3.040, 0.2841, 9.23, 13.53, 1.129, 0.0105),
}


def wgmma_candidates(m: int, n: int, k: int, multiprocessors: int) -> Iterator[Wgmma]:
    """The launches of every instance: on all multiprocessors, or on as many as split every tile evenly (split-K).

    Where several instances make the same number of tiles of these tokens, only the smallest is a candidate.
    """
    steps = -(-k // K_STEP)
    seen = set()
    for tokens, groups in WGMMA_INSTANCES:
        token_tiles = -(-m // tokens)
        tiles = -(-n // (groups * 64)) * token_tiles
        if tiles * groups > COUNTERS or (token_tiles, groups) in seen:
            continue
        if m > tokens * 2 and tokens < 96:
            continue  # the weight would be read many times; not measured
        seen.add((token_tiles, groups))
        most = min(steps, multiprocessors // tiles)
        for parts in range(1, most + 1):
            even = -(-steps // parts)
            if parts <= 4 or steps % parts == 0:
                yield Wgmma(tokens, groups, tiles * parts)
            if 1 < parts <= 4:
                for first in range(even, min(even + even // 4 + 2, steps - parts + 2)):
                    yield Wgmma(tokens, groups, tiles * parts, first)
        if most < 5 or tiles * most < 0.9 * multiprocessors:
            yield Wgmma(tokens, groups, min(multiprocessors, tiles * steps))
        if tokens > 128 and tiles > multiprocessors:
            yield Wgmma(tokens, groups, tiles)


def wgmma_cost(wgmma: Wgmma, m: int, n: int, k: int, multiprocessors: int, costs: WgmmaCosts | None = None) -> float:
    """Microseconds on an H200, within 3 to 5 % (rms) of what was measured; costs: WGMMA_COSTS of the instance if None.

    It is linear in the costs; only where first_split_steps is given, it takes the larger one of two sums of costs.
    """
    given = costs or WGMMA_COSTS[wgmma.tokens, wgmma.groups]
    token_tiles, steps = math.ceil(m / wgmma.tokens), math.ceil(k / K_STEP)
    tiles = math.ceil(n / (wgmma.groups * 64)) * token_tiles
    step = given.step + given.step_more_tiles * (token_tiles > 1 if wgmma.tokens > 128 else token_tiles - 1)
    if tiles == wgmma.grid and tiles > multiprocessors:
        return math.ceil(tiles / multiprocessors) * (given.launch + steps * step)
    step += given.step_away * max(0.0, m * k * 2 - STAYING_BYTES) / 1e6
    if wgmma.first_split_steps:
        parts = wgmma.grid // tiles
        others = math.ceil((steps - wgmma.first_split_steps) / (parts - 1))
        first = wgmma.first_split_steps * step + given.reduction_early
        last = others * step + given.reduction_late + given.reduction_part * (parts - 2)
        return given.launch + max(first, last)
    cost = given.launch + math.ceil(tiles * steps / wgmma.grid) * step
    if tiles % wgmma.grid == 0:
        return cost
    if tiles > wgmma.grid:
        return cost + given.reduction_early
    parts = math.ceil(wgmma.grid / tiles) + (wgmma.grid % tiles != 0)
    return cost + given.reduction_late + given.reduction_part * max(0, parts - 2)
