"""GEMMs of a mixture of experts: which launches compute one, as a pure function of shapes; the groups stay on the device.

    >>> print(plan_moe(1, 8, 128, 1536, 2048, 90, 132, gated=True))
    moe_rows: 1 x 16 warps x 2 blocks, groups of 8, 7 stages, grid 132

A choice is one of a token's top_k experts; a group is several choices of one expert, whose weight is read once for them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from nf4_kernels.plan.moe_rows import (
    MOST_UNSORTED,
    MoeRows,
    capacity,
    copies_boxes,
    list_bytes,
    moe_rows_candidates,
)
from nf4_kernels.plan.rows import GROUP_ROWS, shared_bytes

# (warps, row tiles of 16 in a unit): the instances of csrc/cuda/moe/warps/warps.cu.
MOE_WARPS_INSTANCES = ((16, 1), (8, 2))
# (tokens of a tile, warpgroups): the instances of csrc/cuda/moe/wgmma_sm90/instances.cuh.
MOE_WGMMA_INSTANCES = ((16, 2), (32, 2), (64, 2), (128, 2), (256, 2))
K_STEP = 256
"""k of a step: of moe_warps, and of a wgmma tile, to which activations are padded."""
MOST_STEPS = 4
"""k steps of a row of moe_warps."""
GROUP = 8
"""Choices of a group of moe_warps."""
MOST_GATHERED = 32
"""Choices of the largest tiles whose activations the GEMM itself gathers, by one warp."""
LEAST_TILED = 32
"""Choices of the smallest tiles that a launch in front of the GEMM gathers."""
MOST_OF_ROWS = 4.5
"""Choices of an expert, on average, up to which moe_rows is the faster one."""
MOST_OF_BOXES = 6.5
"""The same where moe_rows copies weights in boxes."""
LEAST_OF_TILES = 10
"""Choices of an expert, on average, from which tiles are gathered by a launch in front."""
SHORT_BLOCKS = 16
"""With up to this many 64-wide k blocks moe_rows has too little work for each group."""
MOST_OF_WARPS = 5.5
"""Choices of an expert, on average, up to which moe_warps is the fastest one where k is short."""
LEAST_SHARED = 128 << 10
"""Bytes of shared memory from which groups of more than 8 choices are worth it."""
LEAST_GROUPED = 24
"""Choices of an expert, on average, from which weights had better be dequantized where there is no wgmma."""
GROUPED_TOKENS = 64
"""Choices of a tile there; tiles of 128 were slower."""
DEQUANTIZED_BYTES = 128 << 20
"""Weights that are dequantized at a time."""
MOST_ADDED = 256
"""Choices up to which moe_warps' thread blocks had better add them up than a launch behind."""
LEAST_EVEN = 0.85
"""The share of the device's time that row groups have to fill for that."""


@dataclass(frozen=True)
class MoeWarps:
    """moe_warps: as moe_rows, with units of its own for each warp; the fields are MoeWarpsPlan of params.h."""

    warps: int
    row_tiles: int
    grid: int
    held_groups: int
    adds: bool

    def workspace_bytes(self, choices: int, x_rows: int, experts: int, n: int, k: int, routed: bool) -> int:
        """Float32 results that a launch behind adds up."""
        return choices * n * 4 if routed and not self.adds else 0

    def shared_bytes(self, choices: int, n: int) -> int:
        """Shared memory of a thread block: MoeWarpsLayout of csrc/cuda/moe/warps/layout.cuh."""
        rows = self.row_tiles * 16
        added = (1 + -(-n // rows // self.grid) * rows) * choices * 4 if self.adds else 0
        return 65536 + 1024 + self.warps * 4 * rows * 128 + self.held_groups * (GROUP + 1) * 4 + added

    def __str__(self) -> str:
        return (
            f"moe_warps: {self.warps} warps x {self.row_tiles * 16} rows, groups of {GROUP}"
            f"{', adds' if self.adds else ''}, grid {self.grid}"
        )


@dataclass(frozen=True)
class MoeWgmma:
    """moe_wgmma: linear_wgmma's tiles, each of one group; the fields are MoeWgmmaPlan of params.h."""

    tokens: int
    groups: int
    grid: int
    tiled: bool

    def workspace_bytes(self, choices: int, x_rows: int, experts: int, n: int, k: int, routed: bool) -> int:
        """The list of groups, x in the order of tiles or tiles of its choices, and 16-bit results that are added up."""
        rows = capacity(choices, experts, self.tokens) * self.tokens if self.tiled else x_rows
        ordered = rows * -(-k // K_STEP) * K_STEP * 2
        return list_bytes(choices, experts, self.tokens) + ordered + (choices * n * 2 if routed else 0)

    def __str__(self) -> str:
        tiled = ", tiled" if self.tiled else ""
        return f"moe_wgmma: {self.tokens} choices x {self.groups * 64} rows{tiled}, grid {self.grid}"


@dataclass(frozen=True)
class MoeGrouped:
    """Slices of the weights are dequantized, and multiplied by a Triton kernel in tiles of `tokens` choices."""

    tokens: int

    def experts_at_once(self, experts: int, n: int, k: int) -> int:
        """Experts of a slice."""
        return min(experts, max(1, DEQUANTIZED_BYTES // (n * k * 2)))

    def most_tiles(self, choices: int, experts: int) -> int:
        """The most tiles that there can be: each expert may have one that is not full."""
        return min(choices, choices // self.tokens + min(experts, choices))

    def workspace_bytes(self, choices: int, x_rows: int, experts: int, n: int, k: int, routed: bool) -> int:
        """A slice of dequantized weights, and 16-bit results."""
        return self.experts_at_once(experts, n, k) * n * k * 2 + choices * n * 2

    def __str__(self) -> str:
        return f"dequantize + tiles of {self.tokens} choices"


MoePlan = MoeRows | MoeWarps | MoeWgmma | MoeGrouped


@dataclass(frozen=True)
class MoeWgmmaCosts:
    """Times of moe_wgmma's launches on a GPU, in microseconds, as bench/kernels/fit_moe_plan.py fits it to launches.

    The first two are a k step of a tile of so many choices whose activations the GEMM gathers, the next four one of a tile
    that a launch in front has gathered.
    """

    gathered_16: float
    gathered_32: float
    tiled_32: float
    tiled_64: float
    tiled_128: float
    tiled_256: float
    epilogue: float
    """The epilogue of a tile of 128 choices."""
    tiling: float
    """The launches in front that gather."""
    tiled_value: float
    """One activation that they gather."""

    def step(self, plan: MoeWgmma) -> float:
        """A k step of a tile."""
        found: float = getattr(self, f"{'tiled' if plan.tiled else 'gathered'}_{plan.tokens}")
        return found


H200_COSTS = MoeWgmmaCosts(0.901, 1.093, 0.861, 1.206, 1.747, 2.738, 5.01, 12.9, 1.78e-6)


def moe_warps_candidates(
    choices: int, experts: int, n: int, k: int, arch: int, multiprocessors: int, routed: bool
) -> list[MoeWarps]:
    """The moe_warps launches that a device can do, where each 64 weights have a scale: k has to be a few steps."""
    scratch = 128 + experts * 4 + (-(-choices // 32) * experts + 1) // 2 * 4
    if k % 64 or k > MOST_STEPS * K_STEP or choices > MOST_UNSORTED:
        return []
    groups, found = capacity(choices, experts, GROUP), []
    for (warps, row_tiles), adds in itertools.product(MOE_WARPS_INSTANCES, (True, False) if routed else (False,)):
        held = groups if adds else -(-groups // multiprocessors) + 2
        plan = MoeWarps(warps, row_tiles, multiprocessors, held + held % 2, adds)
        if plan.shared_bytes(choices, n) <= shared_bytes(arch) and scratch <= warps * row_tiles * 8192:
            found.append(plan)
    return found


def moe_candidates(
    tokens: int,
    top_k: int,
    experts: int,
    n: int,
    k: int,
    arch: int,
    multiprocessors: int,
    nested: bool,
    gated: bool,
    routed: bool = False,
    blocksize: int = 64,
) -> list[MoePlan]:
    """Every launch that a device can do for such a GEMM."""
    found: list[MoePlan] = [
        *moe_rows_candidates(tokens * top_k, experts, k, arch, multiprocessors, nested, gated, routed)
    ]
    if blocksize == 64 and not gated:
        found += moe_warps_candidates(tokens * top_k, experts, n, k, arch, multiprocessors, routed)
    if arch == 90 and not (gated and n % 4):
        for size, groups in MOE_WGMMA_INSTANCES:
            if size <= MOST_GATHERED:
                found.append(MoeWgmma(size, groups, multiprocessors, tiled=False))
            if size >= LEAST_TILED:
                found.append(MoeWgmma(size, groups, multiprocessors, tiled=True))
    if arch != 90:
        found.append(MoeGrouped(GROUPED_TOKENS))
    return found


def _expected_tiles(each: float, size: int) -> float:
    """The expected number of tiles of an expert whose number of choices is random, `each` on average."""
    deviation = math.sqrt(2 * each)
    tiles, most = 1.0, each + 4 * deviation
    for full in range(size, math.ceil(most), size):
        tiles += math.erfc((full + 0.5 - each) / deviation) / 2
    return tiles


def expected_experts(choices: int, experts: int) -> float:
    """Number of experts that so many random choices are of, on average."""
    return experts * (1 - (1 - 1 / experts) ** choices)


def moe_wgmma_cost(
    plan: MoeWgmma, choices: int, chosen: float, n: int, k: int, costs: MoeWgmmaCosts = H200_COSTS
) -> float:
    """Microseconds of a launch for choices of `chosen` experts; costs are fitted so that the choice of a launch is right."""
    tiles = chosen * _expected_tiles(choices / chosen, plan.tokens) * -(-n // (plan.groups * 64))
    each = -(-k // K_STEP) * costs.step(plan) + costs.epilogue * plan.tokens / 128
    cost = tiles / plan.grid * each
    return cost + (costs.tiling + choices * k * costs.tiled_value if plan.tiled else 0.0)


def plan_moe(
    tokens: int,
    top_k: int,
    experts: int,
    n: int,
    k: int,
    arch: int,
    multiprocessors: int,
    blocksize: int = 64,
    nested: bool = True,
    gated: bool = False,
    routed: bool = False,
    groups: bool = True,
) -> MoePlan | None:
    """The launches for `tokens` tokens and experts' weights [n, k] in 16-bit types; None where no kernel fits.

    groups: MoeGrouped can be used. Constants are fitted to bench/results/moe-nvidia-h200.json.
    """
    if k % 64 or blocksize < 64 or arch < 80 or tokens < 1 or n < 1 or k < 1 or (gated and n % 2):
        return None
    candidates = moe_candidates(tokens, top_k, experts, n, k, arch, multiprocessors, nested, gated, routed, blocksize)
    choices = tokens * top_k
    chosen = expected_experts(choices, experts)
    each = choices / chosen
    wgmma: list[MoeWgmma] = [c for c in candidates if isinstance(c, MoeWgmma)]
    rows = [c for c in candidates if isinstance(c, MoeRows)]
    grouped = [c for c in candidates if isinstance(c, MoeGrouped)]
    if groups and grouped and (each >= LEAST_GROUPED or not rows):
        return grouped[0]
    short = k // 64 <= SHORT_BLOCKS
    if short and each <= MOST_OF_WARPS:
        # Thread blocks that add up choices have whole row groups, of which some may have one more than others.
        row_groups = -(-n // GROUP_ROWS)
        adds = choices <= MOST_ADDED and row_groups >= LEAST_EVEN * multiprocessors * -(-row_groups // multiprocessors)
        warps = [c for c in candidates if isinstance(c, MoeWarps)]
        warps.sort(key=lambda c: (c.adds != adds, c.row_tiles != (1 if adds else 2)))
        if warps:
            return warps[0]
    boxed = [c for c in rows if copies_boxes(c, k, arch, blocksize)]
    if boxed and GROUP_ROWS < choices <= MOST_UNSORTED and each <= MOST_OF_BOXES:
        return boxed[0]
    if wgmma and (each > MOST_OF_ROWS or choices > MOST_UNSORTED or not rows or (short and choices > GROUP_ROWS)):
        if each < LEAST_OF_TILES:
            wgmma = [c for c in wgmma if not c.tiled]
        return min(wgmma, key=lambda plan: moe_wgmma_cost(plan, choices, chosen, n, k))
    little_shared = shared_bytes(arch) < LEAST_SHARED
    tiles = 1 if each <= 5 or choices <= 8 or little_shared else 2 if each <= 10 else 4
    if short and choices <= GROUP_ROWS:
        rows.sort(key=lambda c: (not c.adds, c.blocks, c.tiles))
    else:
        blocks = 2 if choices <= GROUP_ROWS else 4
        rows.sort(key=lambda c: (abs(c.tiles - tiles), c.parts, abs(c.blocks - blocks)))
    return rows[0] if rows else None
