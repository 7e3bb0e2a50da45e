"""linear_rows: which launches a device can do for a weight, and what they cost. For up to 8 tokens, on Hopper and sm_100."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Rows of a row group, and of its halves; a thread block's share of a weight may end at a half.
GROUP_ROWS = 16
HALF_ROWS = 8
MAX_ROWS_TOKENS = 8
"""Tokens of one launch, which are the n of one mma."""
# Blocks that share row groups -> how many such clusters a multiprocessor has room for (four do not fit everywhere).
CLUSTERS = {1: 1.0, 2: 1 / 2, 4: 30 / 132}
# (warps, k blocks of a warp): the instances of csrc/cuda/rows/linear_rows.cu.
INSTANCES = ((8, 9), (8, 10), (12, 7), *((16, blocks) for blocks in (1, 2, 3, 4, 6, 7, 8)))
_SHARED_BYTES = 227 << 10
"""Shared memory of a thread block that the instances take; elsewhere linear_mma is faster."""
_EVEN_SHARE = 0.95
"""The least share of a device's multiprocessors that a launch has to keep busy where its runs can be equally long."""

# Microseconds on an H200, fitted to launches of one to 8 tokens.
_LAUNCH_US = 4.0
# Of these two 0.5 us, 3 us and all are what launches take more in a layer, behind other kernels, than behind their like:
# fitted to layers of eight models with 1 to 8 tokens (bench/results/layer-launches-nvidia-h200.json).
_CLUSTER_US = {1: 0.0, 2: 0.78, 4: 3.4}
"""Added by the size of the cluster, in thread blocks, through which partial sums go."""
_FEW_WARPS_US = 0.5
"""Added where there are fewer than 16 warps."""
_GROUP_US = 0.215
"""A row group in one pass."""
_GROUP_BLOCK_US = 0.237
"""Added for each k block of its 16 warps."""
_FEW_STAGES_FACTOR = 1.15
"""The factor with two stages, where the copies are the bound."""
_PASS_ACTIVATIONS_US = 1.05
_MORE_PASS_ACTIVATIONS_US = 0.39
"""Loading activations takes so long for each 64 k blocks, in the first pass and in each later one, times what follows."""
_ACTIVATIONS_FACTOR = 0.24
_TOKEN_ACTIVATIONS_FACTOR = 0.095
"""Added to the factor for each token."""


@dataclass(frozen=True)
class Rows:
    """linear_rows: weight rows stream past activations held in registers; the fields are RowsPlan of params.h."""

    warps: int
    blocks: int
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
            f"rows: {self.warps} warps x {self.blocks} blocks, {MAX_ROWS_TOKENS} tokens, {self.stages} stages, "
            f"k in {split} of {self.part_blocks} blocks, grid {self.grid}"
        )


def shared_bytes(arch: int) -> int:
    """Shared memory that a thread block can have, as far as what is compiled uses it: 8.7 runs what is compiled for 8.6."""
    if arch == 80:
        return 163 << 10
    return _SHARED_BYTES if 90 <= arch < 120 else 99 << 10


def rows_stages(warps: int, blocks: int, nested: bool, slots: int = 0) -> int:
    """Number of ring stages that fit with `slots` row groups' sums: RowsLayout of csrc/cuda/rows/layout.cuh."""
    stage_blocks = warps * blocks
    scale_pitch = ((stage_blocks * (1 if nested else 4) + 30) // 16 | 1) * 16
    stage = GROUP_ROWS * (stage_blocks * 32 + 32 * (stage_blocks % 2 == 0) + scale_pitch)
    codes_squares = 1024 + warps * 32 * nested
    fixed = 65536 + codes_squares + 2 * warps * 512 + 256 + slots * 512
    decoded = 65536 // ((stage_blocks + 1) // 2 * 256)
    limit = 4 if blocks == 4 else 7  # their codes come in two pieces, each with its barriers
    return max(0, min(limit, decoded, (_SHARED_BYTES - fixed) // stage))


def rows_candidates(n: int, k: int, arch: int, multiprocessors: int, nested: bool) -> list[Rows]:
    """Every linear_rows launch that a device can do for a weight [n, k]."""
    k_blocks, groups = k // 64, -(-n // GROUP_ROWS)
    found: list[Rows] = []
    for warps, blocks in INSTANCES if shared_bytes(arch) == _SHARED_BYTES else ():
        for cluster, share in CLUSTERS.items():
            runs = _even(min(int(multiprocessors * share), groups), -(-n // HALF_ROWS))
            fewest = -(-k_blocks // (cluster * warps * blocks))
            for passes in range(fewest, fewest + 3):
                parts = cluster * passes
                part_blocks = -(-k_blocks // parts)
                if parts > 1:
                    part_blocks = -(-part_blocks // 4) * 4  # keeps rows' scales aligned
                # A warp has no more k blocks than the instance holds, and not so few that a smaller instance would do; no
                # part is empty.
                if not warps * (blocks - 1) < part_blocks <= warps * blocks or (parts - 1) * part_blocks >= k_blocks:
                    continue
                chunk = min(-(-groups // runs), 16) if passes > 1 else -(-groups // runs)
                slots = 2 * (cluster - 1) + (chunk if passes > 1 else 0)
                stages = rows_stages(warps, blocks, nested, slots)
                if stages >= 2:
                    grid = runs * cluster
                    found.append(Rows(warps, blocks, stages, cluster, passes, part_blocks, chunk, grid))
    return found


def _even(runs: int, halves: int) -> int:
    """Fewer runs where these are little fewer and the longest is no longer: the launch behind finds idle multiprocessors.

    halves: the half groups of the weight, which are divided among the runs.
    """
    fewer = -(-halves // -(-halves // runs))
    return fewer if fewer >= _EVEN_SHARE * runs else runs


def rows_cost(rows: Rows, m: int, n: int) -> float:
    """Estimate microseconds on an H200: the launch, the row groups of the busiest block, and loading its activations."""
    # A half group at a run's end counts as a whole one, because what it saves was too little to be measured.
    groups = math.ceil(math.ceil(n / GROUP_ROWS) * rows.cluster / rows.grid) * rows.passes
    blocks: float = rows.blocks
    if rows.stages > 2:
        # Warps without a k block in the last round save about half a block's time; with two stages the copies are the bound.
        blocks = (rows.blocks + rows.part_blocks / rows.warps) / 2
    group = _GROUP_US + _GROUP_BLOCK_US * blocks * rows.warps / 16
    group *= _FEW_STAGES_FACTOR if rows.stages < 3 else 1.0
    passes = _PASS_ACTIVATIONS_US + _MORE_PASS_ACTIVATIONS_US * (rows.passes - 1)
    activations = rows.part_blocks / 64 * passes * (_ACTIVATIONS_FACTOR + _TOKEN_ACTIVATIONS_FACTOR * m)
    launch = _LAUNCH_US + _CLUSTER_US[rows.cluster] + _FEW_WARPS_US * (rows.warps < 16)
    return launch + groups * group + activations
