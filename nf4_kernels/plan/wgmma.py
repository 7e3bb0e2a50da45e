"""linear_wgmma: which launches a Hopper GPU can do for a GEMM, and what they cost. For more than a few tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nf4_kernels.plan.limits import COUNTERS

WGMMA_TOKENS = range(9, 1025)
K_STEP = 256
"""k of a step, the unit of work that stream-K hands out."""


def tile_count(tokens: int, groups: int, m: int, n: int) -> int:
    """Tiles of an instance (tokens of a tile, warpgroups) in a GEMM of m tokens and n weight rows."""
    return -(-n // (groups * 64)) * -(-m // tokens)


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
        split = tile_count(self.tokens, self.groups, m, n) % self.grid != 0
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
    """Added to a k step for each token tile after the first; for all of these in tiles of over 128 tokens."""
    reduction_early: float
    """The reduction of a split tile whose partial sums are there when the reducing block comes to them."""
    reduction_late: float
    """The reduction of a split tile all of whose blocks end at the same time."""
    reduction_part: float
    """Added for each of a split tile's blocks beyond two, early or late."""
    step_away: float = 0.0
    """Added to a k step for each MB of activations beyond STAYING_BYTES, where blocks are at different k."""
    wave: float = 0.0
    """Added for each wave after the first, if every tile has a block of its own."""


STAYING_BYTES = 16e6
"""Activations that stay in L2 while blocks read them at different k."""

# Tiles of 16 tokens, and of (32, 3) all but the launch, are fitted on an H200 to 13 to 19 shapes and 16 to 64
# tokens. All others are fitted on an H200 to launches behind a read of 256 MB (15 shapes with 40 random numbers of
# tokens from 33 to 1024 each, bench/results/wgmma-launches-nvidia-h200.json) and, weighted eightfold, to launches
# behind one another in a graph, as a step has them (6 shapes, 24 to 400 tokens,
# bench/results/wgmma-chains-nvidia-h200.json); to these 3 us are added, by which they overlap. The costs choose
# launches that take 0.20 and 0.28 % longer than the best there, in the mean. All launches of (64, 3) have a
# reduction: what one without it takes is from an earlier fit. (200, 2) and (256, 2) were moved between the two
# fits. (48, 3) and (80, 3) are fitted to launches behind one another alone (11 shapes, 40 to 280 tokens), and the
# step of (96, 2), which has got two buffers of sums since, is 1.8 % less: of the 69 points with 40 to 96 tokens
# all of these costs choose launches 0.27 % longer than the best, without (48, 3) and (80, 3) 1.8 %.
WGMMA_COSTS = {
    (16, 2): WgmmaCosts(5.43, 0.738, 0.0, 2.31, 4.01, 0.183),
    (16, 3): WgmmaCosts(7.08, 1.072, 0.0, 0.24, 2.55, 0.393),
    (32, 2): WgmmaCosts(5.789, 0.9353, 0.02262, 1.707, 3.347, 0.738),
    (32, 3): WgmmaCosts(8.94, 1.252, 0.155, 0.72, 3.07, 0.39),
    (48, 2): WgmmaCosts(5.231, 1.14, 0, 1.752, 3.65, 0.9642),
    (48, 3): WgmmaCosts(7.42, 1.474, 0, 1.698, 4.577, 0.1759),
    (64, 2): WgmmaCosts(5.66, 1.278, 0, 1.941, 3.929, 0.9265),
    (64, 3): WgmmaCosts(7.57, 1.77, 0, 0.7, 3.81, 0.9042),
    (80, 2): WgmmaCosts(5.472, 1.531, 0.005947, 2.118, 4.359, 1.057),
    (80, 3): WgmmaCosts(7.447, 1.946, 0, 2.114, 5.537, 0.2681),
    (96, 2): WgmmaCosts(5.929, 1.645, 0.001314, 1.511, 4.259, 1.209, 0.01166),
    (112, 2): WgmmaCosts(6.07, 1.787, 0.004839, 1.567, 4.431, 1.271, 0.01154),
    (128, 2): WgmmaCosts(5.088, 1.948, 0.007762, 2.424, 5.341, 1.507, 0.008762),
    (136, 2): WgmmaCosts(4.008, 1.955, 0.09881, 4.831, 6.161, 2.521, 0.007266, 1.366),
    (144, 2): WgmmaCosts(5.304, 2.067, 0.0784, 1.762, 5.099, 1.55, 0.007724, 0.06169),
    (152, 2): WgmmaCosts(2.813, 2.151, 0.02228, 3.398, 7.154, 0.6842, 0.009693),
    (160, 2): WgmmaCosts(5.235, 2.172, 0.1491, 1.713, 4.738, 1.657, 0.007301),
    (176, 2): WgmmaCosts(3.875, 2.299, 0.06451, 7.22, 9.909, 2.066, 0.0112, 0.7243),
    (192, 2): WgmmaCosts(2.89, 2.445, 0.0994, 7.46, 12, 1.409, 0.00882, 0.1684),
    (200, 2): WgmmaCosts(4.243, 2.52, 0.09, 3.9, 8.6, 1.53, 0.01),
    (208, 2): WgmmaCosts(2.548, 2.557, 0.1249, 7.09, 11.52, 2.466, 0.008975, 0.6208),
    (216, 2): WgmmaCosts(4.643, 2.658, 0.09305, 6.751, 10.59, 2.922, 0.01747, 1.116),
    (224, 2): WgmmaCosts(2.134, 2.74, 0.1533, 7.819, 10.8, 3.027, 0.01446, 1.311),
    (232, 2): WgmmaCosts(3.596, 2.868, 0.1737, 6.73, 6.056, 4.982, 0.007416, 0.2262),
    (240, 2): WgmmaCosts(0.353, 3.013, 0.1273, 8.863, 10.09, 3.032, 0.01015, 1.331),
    (256, 2): WgmmaCosts(2.703, 3.13, 0.1444, 4.32, 8.144, 3.296, 0.01143),
}
WGMMA_INSTANCES = tuple(WGMMA_COSTS)
"""(tokens of a tile, warpgroups): the instances of csrc/cuda/wgmma_sm90/instances.cuh; ordered by tokens."""


def wgmma_candidates(m: int, n: int, k: int, multiprocessors: int) -> Iterator[Wgmma]:
    """The launches of every instance: on all multiprocessors, or on as many as split every tile evenly (split-K).

    Where several instances make the same number of tiles of these tokens, only the smallest is a candidate.
    """
    steps = -(-k // K_STEP)
    seen = set()
    for tokens, groups in WGMMA_INSTANCES:
        token_tiles, tiles = -(-m // tokens), tile_count(tokens, groups, m, n)
        if tiles * groups > COUNTERS or (token_tiles, groups) in seen:
            continue
        if m > tokens * 2 and tokens < 80:
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
    """Microseconds on an H200, within 2 to 6 % (rms) of what was measured; costs: WGMMA_COSTS of the instance if None.

    It is linear in the costs; only where first_split_steps is given, it takes the larger one of two sums of costs.
    """
    given = costs or WGMMA_COSTS[wgmma.tokens, wgmma.groups]
    token_tiles, steps = math.ceil(m / wgmma.tokens), math.ceil(k / K_STEP)
    tiles = tile_count(wgmma.tokens, wgmma.groups, m, n)
    step = given.step + given.step_more_tiles * (token_tiles > 1 if wgmma.tokens > 128 else token_tiles - 1)
    if tiles == wgmma.grid and tiles > multiprocessors:
        waves = math.ceil(tiles / multiprocessors)
        return given.launch + waves * steps * step + (waves - 1) * given.wave
    step += given.step_away * max(0.0, m * k * 2 - STAYING_BYTES) / 1e6
    if wgmma.first_split_steps:
        parts = wgmma.grid // tiles
        others = math.ceil((steps - wgmma.first_split_steps) / (parts - 1))
        first = wgmma.first_split_steps * step + given.reduction_early
        last = others * step + given.reduction_late
        return given.launch + max(first, last) + given.reduction_part * (parts - 2)
    cost = given.launch + math.ceil(tiles * steps / wgmma.grid) * step
    if tiles % wgmma.grid == 0:
        return cost
    if tiles > wgmma.grid:
        return cost + given.reduction_early
    parts = math.ceil(wgmma.grid / tiles) + (wgmma.grid % tiles != 0)
    return cost + given.reduction_late + given.reduction_part * max(0, parts - 2)
