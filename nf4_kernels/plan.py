"""Which kernel multiplies a shape, as a pure function: (M, N, K, arch) -> a choice that prints itself.

    >>> print(plan(8, 25600, 5120, 90, 132))
    rows: 8 warps x 10 blocks, 8 tokens, 3 stages, k in 1 part of 80 blocks, grid 132

The costs are fitted to measurements on an H200; bench/results/ holds what each choice reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

# Of a row group, and of its halves, at which a block's share of a weight may end.
GROUP_ROWS = 16
HALF_ROWS = 8
MAX_ROWS_TOKENS = 32
WORKSPACE_BYTES = 32 << 20
COUNTERS = 1 << 16
# Of the weight that is multiplied next, brought into L2 as a launch ends.
PREFETCH_BYTES = 8 << 20
# Blocks that share row groups -> how many such clusters a multiprocessor has room for (four do not fit everywhere).
CLUSTERS = {1: 1.0, 2: 1 / 2, 4: 30 / 132}
# (warps, k blocks of a warp, token tiles): the instances of csrc/cuda/rows/linear_rows.cu.
INSTANCES = (
    (8, 9, 1),
    (8, 10, 1),
    (12, 7, 1),
    *((16, blocks, 1) for blocks in range(1, 9)),
    *((16, blocks, 2) for blocks in range(1, 5)),
    (14, 6, 2),
    (16, 1, 4),
    (16, 2, 4),
)
# The same for devices whose blocks have 99 KB of shared memory.
SMALL_INSTANCES = ((8, 1, 1), (8, 2, 1), (4, 2, 2), (4, 4, 2), (4, 2, 4))
# (tokens of a tile, warpgroups): the instances of csrc/cuda/wgmma_sm90/linear_wgmma.cu.
WGMMA_INSTANCES = ((16, 2), (16, 3), (32, 2), (32, 3), (64, 2), (64, 3), (128, 2), (256, 2))
WGMMA_TOKENS = range(9, 1025)
# The longest rows that products normalise: NF4_NORM_K of csrc/params.h.
NORM_K = 16384
_SMALL_SHARED_BYTES = 99 << 10
_WHOLE_ROWS = 12288
# By how much memory and tensor cores are slower than an H200's, by data sheets (A100; RTX 3090, 4090; RTX 5090): between a
# weight read once for each few rows and one dequantized. Not measured.
_SLOWER = {80: 2.5, 86: 5.0, 89: 5.0, 120: 3.0}
# More rows than one launch of linear_rows takes are several launches up to here, where there is no linear_wgmma.
_MANY_ROWS = 256


@dataclass(frozen=True)
class Rows:
    """linear_rows: weight rows stream past activations held in registers; the fields are RowsPlan of params.h."""

    warps: int
    blocks: int
    tiles: int
    stages: int
    cluster: int
    passes: int
    part_blocks: int
    chunk: int
    grid: int

    def __str__(self) -> str:
        parts = self.cluster * self.passes
        split = "1 part" if parts == 1 else f"{self.cluster} x {self.passes} parts"
        return (
            f"rows: {self.warps} warps x {self.blocks} blocks, {self.tiles * 8} tokens, {self.stages} stages, "
            f"k in {split} of {self.part_blocks} blocks, grid {self.grid}"
        )


@dataclass(frozen=True)
class Wgmma:
    """linear_wgmma: weights decoded into wgmma's register operand; the fields are WgmmaPlan of params.h."""

    tokens: int
    groups: int
    grid: int
    owner_steps: int = 0

    def workspace_bytes(self, m: int, n: int, k: int) -> int:
        """Arranged activations and sums of cut tiles: WgmmaSizes of csrc/cuda/wgmma_sm90/linear_wgmma.cu."""
        token_tiles, rows = -(-m // self.tokens), self.groups * 64
        arranged = token_tiles * self.tokens * -(-k // 256) * 512
        cut = -(-n // rows) * token_tiles % self.grid != 0
        return arranged + cut * self.grid * rows * self.tokens * 4

    def __str__(self) -> str:
        cut = f", {self.owner_steps} steps in a tile's first part" if self.owner_steps else ""
        return f"wgmma: {self.tokens} tokens x {self.groups * 64} rows, grid {self.grid}{cut}"


@dataclass(frozen=True)
class Slices:
    """Dequantize `rows` weight rows at a time into a buffer, multiply each slice with cuBLAS."""

    rows: int

    def __str__(self) -> str:
        return f"slices: dequantize {self.rows} rows, then cuBLAS"


def plan(
    m: int,
    n: int,
    k: int,
    arch: int,
    multiprocessors: int,
    blocksize: int = 64,
    nested: bool = True,
    normalised: bool = False,
) -> Rows | Wgmma | Slices:
    """The choice for x [m, k] times a weight [n, k] in 16-bit types; arch is 10 * major + minor compute capability.

    normalised: x is normalised in the launch, which linear_rows does in the first pass only.
    """
    choice: Rows | Wgmma | Slices = Slices(_slice_rows(n, multiprocessors))
    slower = _SLOWER.get(arch, 1.0)
    cost = _slices_cost(m, n, k) * slower
    if k % 64 or blocksize < 64 or arch < 80:
        return choice
    if 1 <= m <= (MAX_ROWS_TOKENS if arch == 90 else _MANY_ROWS):
        tiles = 1 if m <= 8 else 2 if m <= 16 else 4
        launches, least = math.ceil(m / (tiles * 8)), n * k * _WEIGHT_COST * slower
        for rows in rows_candidates(n, k, tiles, arch, multiprocessors, nested):
            if normalised and rows.passes > 1:
                continue
            rows_cost = launches * max(least, _rows_cost(rows, min(m, tiles * 8), n))
            if rows_cost < cost or (m <= MAX_ROWS_TOKENS and isinstance(choice, Slices)):
                choice, cost = rows, rows_cost
    if arch == 90 and m in WGMMA_TOKENS:
        for wgmma in _wgmma_candidates(m, n, k, multiprocessors):
            wgmma_cost = _wgmma_cost(wgmma, m, n, k, multiprocessors)
            if wgmma_cost < cost:
                choice, cost = wgmma, wgmma_cost
    return choice


# Microseconds of a launch; of a unit (groups * 64 rows x tokens x 256 k), and what it takes longer for each token tile
# beyond the first (of 256 tokens: for any); of a cut tile whose parts are there when its owner comes to them, and of
# one all of whose parts are done at the same time; of each of its parts beyond two.
_WGMMA_COSTS = {
    (16, 2): (5.43, 0.738, 0.0, 2.31, 4.01, 0.183),
    (16, 3): (7.08, 1.072, 0.0, 0.24, 2.55, 0.393),
    (32, 2): (5.56, 0.860, 0.03, 2.16, 4.12, 0.291),
    (32, 3): (7.30, 1.252, 0.03, 0.72, 3.07, 0.390),
    (64, 2): (5.97, 1.152, 0.0, 2.44, 4.74, 0.529),
    (64, 3): (7.57, 1.658, 0.0, 1.26, 3.97, 0.765),
    (128, 2): (5.95, 1.726, 0.0986, 4.13, 7.00, 0.495),
    (256, 2): (2.29, 3.040, 0.2841, 9.23, 13.53, 1.129),
}
# Of 256 tokens, where blocks are at different k: what a unit takes longer for each MB of activations beyond those that
# stay in L2.
_AWAY = 0.0105
_STAYING = 16e6


def _wgmma_candidates(m: int, n: int, k: int, multiprocessors: int) -> Iterator[Wgmma]:
    """The instances, on all multiprocessors or on so many that every tile is cut into as many parts."""
    steps = -(-k // 256)
    for tokens, groups in WGMMA_INSTANCES:
        tiles = -(-n // (groups * 64)) * -(-m // tokens)
        if tiles * groups > COUNTERS:
            continue
        if m > tokens * 2 and tokens < 128:
            continue  # the weight would be read many times; not measured
        most = min(steps, multiprocessors // tiles)
        for parts in range(1, most + 1):
            even = -(-steps // parts)
            if parts <= 4 or steps % parts == 0:
                yield Wgmma(tokens, groups, tiles * parts)
            if 1 < parts <= 4:
                for owner_steps in range(even, min(even + even // 4 + 2, steps - parts + 2)):
                    yield Wgmma(tokens, groups, tiles * parts, owner_steps)
        if most < 5 or tiles * most < 0.9 * multiprocessors:
            yield Wgmma(tokens, groups, min(multiprocessors, tiles * steps))
        if tokens == 256 and tiles > multiprocessors:
            yield Wgmma(tokens, groups, tiles)


def _wgmma_cost(wgmma: Wgmma, m: int, n: int, k: int, multiprocessors: int) -> float:
    """Microseconds, within 3 to 5 % (rms) of what was measured for 13 to 19 shapes and 16 to 512 rows, 4 shapes and 1024."""
    launch, unit, more, early, late, part = _WGMMA_COSTS[wgmma.tokens, wgmma.groups]
    token_tiles, steps = math.ceil(m / wgmma.tokens), math.ceil(k / 256)
    tiles = math.ceil(n / (wgmma.groups * 64)) * token_tiles
    unit += more * (token_tiles > 1 if wgmma.tokens == 256 else token_tiles - 1)
    if tiles == wgmma.grid and tiles > multiprocessors:
        return math.ceil(tiles / multiprocessors) * (launch + steps * unit)
    if wgmma.tokens == 256:
        unit += _AWAY * max(0.0, m * k * 2 - _STAYING) / 1e6
    if wgmma.owner_steps:
        parts = wgmma.grid // tiles
        others = math.ceil((steps - wgmma.owner_steps) / (parts - 1))
        return launch + max(wgmma.owner_steps * unit + early, others * unit + late + part * (parts - 2))
    cost = launch + math.ceil(tiles * steps / wgmma.grid) * unit
    if tiles % wgmma.grid == 0:
        return cost
    if tiles > wgmma.grid:
        return cost + early
    parts = math.ceil(wgmma.grid / tiles) + (wgmma.grid % tiles != 0)
    return cost + late + part * max(0, parts - 2)


# Microseconds that 4 bits are on their way from an H200's memory.
_WEIGHT_COST = 0.5 / 4.2e6


def _slices_cost(m: int, n: int, k: int) -> float:
    """Microseconds, roughly: two launches, the weight written and read, the product (slower where power is short)."""
    many, large = max(0, m - 512), max(0.0, n * k - 30e6)
    return 12.5 + n * k * (1.1e-6 + 1.5e-9 * m + 0.6e-9 * many) + large * many * 1.56e-9


def _slice_rows(n: int, multiprocessors: int) -> int:
    """Rows of a slice of a large weight: cuBLAS's tiles of 128 rows x 256 tokens then fill all multiprocessors evenly.

    Slices bound the buffer too. Such that they fit in L2 they would lose more to small products than they save.
    """
    return n if n <= _WHOLE_ROWS else 64 * multiprocessors


def shared_bytes(arch: int) -> int:
    """Shared memory that a block can have, as far as what is compiled uses it: 8.7 runs what is compiled for 8.6."""
    if arch == 80:
        return 163 << 10
    return 227 << 10 if 90 <= arch < 120 else _SMALL_SHARED_BYTES


def rows_stages(warps: int, blocks: int, tiles: int, nested: bool, shared_bytes: int, slots: int = 0) -> int:
    """How many ring stages fit beside `slots` row groups' sums: RowsLayout of csrc/cuda/rows/layout.cuh."""
    stage_blocks = warps * blocks
    scale_pitch = ((stage_blocks * (1 if nested else 4) + 30) // 16 | 1) * 16
    stage = GROUP_ROWS * (stage_blocks * 32 + 32 * (stage_blocks % 2 == 0) + scale_pitch)
    codes_squares = 1024 + warps * tiles * 32 if nested else max(1024, warps * tiles * 32)
    fixed = 65536 + codes_squares + 2 * warps * tiles * 512 + 256 + slots * tiles * 512
    decoded = 65536 // ((stage_blocks + 1) // 2 * 256)
    limit = 4 if (blocks, tiles) == (4, 1) else 7  # their codes come in two pieces, each with its barriers
    return max(0, min(limit, decoded, (shared_bytes - fixed) // stage))


def rows_candidates(n: int, k: int, tiles: int, arch: int, multiprocessors: int, nested: bool) -> list[Rows]:
    """Every linear_rows launch that a device can do for a weight [n, k] and tiles of 8 rows of x."""
    k_blocks, groups = k // 64, -(-n // GROUP_ROWS)
    found, shared = [], shared_bytes(arch)
    small = shared == _SMALL_SHARED_BYTES
    for warps, blocks, instance_tiles in SMALL_INSTANCES if small else INSTANCES:
        if instance_tiles != tiles:
            continue
        for cluster, share in CLUSTERS.items():
            if cluster > 1 and (arch < 90 or small):
                continue
            runs = min(int(multiprocessors * share), groups)
            fewest = -(-k_blocks // (cluster * warps * blocks))
            for passes in range(fewest, fewest + 3):
                parts = cluster * passes
                part_blocks = -(-k_blocks // parts)
                if parts > 1:
                    part_blocks = -(-part_blocks // 4) * 4  # keeps rows' scales aligned
                # Neither more than the instance holds nor so few that a smaller one would do; no part without any.
                if not warps * (blocks - 1) < part_blocks <= warps * blocks or (parts - 1) * part_blocks >= k_blocks:
                    continue
                chunk = min(-(-groups // runs), 16 // tiles) if passes > 1 else -(-groups // runs)
                if small and passes > 1:
                    while chunk > 1 and rows_stages(warps, blocks, tiles, nested, shared, chunk) < 2:
                        chunk -= 1
                slots = 2 * (cluster - 1) + (chunk if passes > 1 else 0)
                stages = rows_stages(warps, blocks, tiles, nested, shared, slots)
                if stages >= 2:
                    grid = runs * cluster
                    found.append(Rows(warps, blocks, tiles, stages, cluster, passes, part_blocks, chunk, grid))
    return found


def _rows_cost(rows: Rows, m: int, n: int) -> float:
    """Microseconds, roughly: the launch, the units of the busiest block, and its activations' way in."""
    # What a half group at a run's end saves was too little to be measured: it counts whole.
    units = math.ceil(math.ceil(n / GROUP_ROWS) * rows.cluster / rows.grid) * rows.passes
    blocks: float = rows.blocks
    if rows.stages > 2:
        # Warps without a k block in the last round save about half a block's time; with two stages the copies are the bound.
        blocks = (rows.blocks + rows.part_blocks / rows.warps) / 2
    long = rows.blocks >= 4
    unit = 0.215 + 0.237 * blocks * rows.warps / 16 * {1: 1.0, 2: 1.4 if long else 1.6, 4: 3.1}[rows.tiles]
    unit *= 1.15 if rows.stages < 3 else 1.0
    if rows.tiles == 4:
        unit *= 1.25 if rows.blocks == 1 else 1.7  # registers run short
    launch = 4.0
    if rows.tiles == 2:
        launch += 2.5 if long and rows.passes > 1 else 1.0
    activations = rows.part_blocks / 64 * (1.05 + 0.39 * (rows.passes - 1)) * (0.24 + 0.095 * m)
    return launch + units * unit + activations + {1: 0.0, 2: 0.28, 4: 0.39}[rows.cluster]
