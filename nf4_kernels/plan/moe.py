"""GEMMs of a mixture of experts: which launches compute one, as a pure function of shapes; the groups stay on the device.

    >>> print(plan_moe(1, 8, 128, 1536, 2048, 90, 132, gated=True))
    moe_rows: 16 warps x 2 blocks, groups of 8, 7 stages, grid 132

A choice is one of a token's top_k experts; a group is up to so many choices of one expert, whose weight is read once for
them.
"""

from __future__ import annotations

from dataclasses import dataclass

from nf4_kernels.plan.rows import rows_stages, shared_bytes, stage_bytes

# (warps, k blocks of a warp, token tiles of 8): the instances of csrc/cuda/moe/rows.cu.
MOE_INSTANCES = (
    *((16, blocks, 1) for blocks in (1, 2, 3, 4, 8)),
    *((16, blocks, 2) for blocks in (1, 2, 3, 4)),
    *((16, blocks, 4) for blocks in (1, 2)),
)
# The same for devices whose blocks have 99 KB of shared memory.
MOE_SMALL_INSTANCES = ((8, 1, 1), (8, 2, 1), (4, 2, 2))
# (tokens of a tile, warpgroups): the instances of csrc/cuda/moe/wgmma_sm90/instances.cuh.
MOE_WGMMA_INSTANCES = ((16, 2), (32, 2), (64, 2), (128, 2), (256, 2))
MOST_UNSORTED = 1024
"""Choices that thread blocks group themselves."""
K_STEP = 256
"""k of a step of a wgmma tile, to which activations are padded."""
_SMALL_SHARED_BYTES = 99 << 10


def _capacity(choices: int, experts: int, size: int) -> int:
    """The most groups that there can be: moe_capacity() of csrc/cuda/moe/args.cuh."""
    return -(-min(choices // size + min(experts, choices), choices) // 4) * 4


def _list_bytes(choices: int, experts: int, size: int) -> int:
    """Bytes of a list of groups: list_bytes() of csrc/cuda/moe/args.cuh."""
    return -(-(4 + _capacity(choices, experts, size) * (1 + size)) * 4 // 256) * 256


@dataclass(frozen=True)
class MoeRows:
    """moe_rows: the weight rows of chosen experts stream past their choices; the fields are MoeRowsPlan of params.h."""

    warps: int
    blocks: int
    tiles: int
    stages: int
    parts: int
    part_blocks: int
    grid: int
    held_groups: int
    sorted: bool

    def workspace_bytes(self, choices: int, x_rows: int, experts: int, n: int, k: int, routed: bool) -> int:
        """The list of groups, if any, and float32 results that a launch behind adds up."""
        listed = _list_bytes(choices, experts, self.tiles * 8) if self.sorted else 0
        return listed + (self.parts * choices * n * 4 if routed or self.parts > 1 else 0)

    def __str__(self) -> str:
        parts = "" if self.parts == 1 else f", k in {self.parts} parts"
        return (
            f"moe_rows: {self.warps} warps x {self.blocks} blocks, groups of {self.tiles * 8}"
            f"{', sorted' if self.sorted else ''}{parts}, {self.stages} stages, grid {self.grid}"
        )


@dataclass(frozen=True)
class MoeWgmma:
    """moe_wgmma: linear_wgmma's tiles, each of one group; the fields are MoeWgmmaPlan of params.h."""

    tokens: int
    groups: int
    grid: int

    def workspace_bytes(self, choices: int, x_rows: int, experts: int, n: int, k: int, routed: bool) -> int:
        """The list of groups, x in the order of tiles, and 16-bit results that a launch behind adds up."""
        ordered = x_rows * -(-k // K_STEP) * K_STEP * 2
        return _list_bytes(choices, experts, self.tokens) + ordered + (choices * n * 2 if routed else 0)

    def __str__(self) -> str:
        return f"moe_wgmma: {self.tokens} choices x {self.groups * 64} rows, grid {self.grid}"


MoePlan = MoeRows | MoeWgmma


def moe_rows_candidate(
    tiles: int, choices: int, experts: int, k: int, arch: int, multiprocessors: int, nested: bool, gated: bool
) -> MoeRows | None:
    """The moe_rows launch with groups of 8 * tiles choices; None where no instance fits."""
    k_blocks, size, shared = k // 64, tiles * 8, shared_bytes(arch)
    small = shared == _SMALL_SHARED_BYTES
    fitting = [i for i in (MOE_SMALL_INSTANCES if small else MOE_INSTANCES) if i[2] == tiles]
    held = -(-_capacity(choices, experts, size) // multiprocessors) + 2
    held += held % 2
    for warps, blocks, _ in fitting:
        last = (warps, blocks, tiles) == fitting[-1]
        if warps * blocks < k_blocks and not last:
            continue
        parts = -(-k_blocks // (warps * blocks))
        if parts > 1 and gated:
            return None
        part_blocks = k_blocks if parts == 1 else -(-k_blocks // parts // 4) * 4
        if part_blocks > warps * blocks:
            parts, part_blocks = parts + 1, warps * blocks
        stages = rows_stages(warps, blocks, tiles, nested, shared - held * (size + 1) * 4)
        if stages < 2:
            return None
        scratch = 128 + experts * 4 + -(-choices // 32) * experts * 2
        is_sorted = choices > MOST_UNSORTED or (choices > 32 and scratch > stages * stage_bytes(warps, blocks, nested))
        return MoeRows(warps, blocks, tiles, stages, parts, part_blocks, multiprocessors, held, is_sorted)
    return None


def moe_candidates(
    tokens: int, top_k: int, experts: int, n: int, k: int, arch: int, multiprocessors: int, nested: bool, gated: bool
) -> list[MoePlan]:
    """Every launch that a device can do for such a GEMM."""
    choices = tokens * top_k
    found: list[MoePlan] = []
    for tiles in (1, 2, 4):
        rows = moe_rows_candidate(tiles, choices, experts, k, arch, multiprocessors, nested, gated)
        if rows is not None:
            found.append(rows)
    if arch == 90 and not (gated and n % 4):
        found += [MoeWgmma(size, groups, multiprocessors) for size, groups in MOE_WGMMA_INSTANCES]
    return found


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
) -> MoePlan | None:
    """The choice for x of so many tokens and experts' weights [n, k] in 16-bit types; None where no kernel fits."""
    if k % 64 or blocksize < 64 or arch < 80 or tokens < 1 or n < 1 or k < 1 or (gated and n % 2):
        return None
    candidates = moe_candidates(tokens, top_k, experts, n, k, arch, multiprocessors, nested, gated)
    choices = tokens * top_k
    chosen = experts * (1 - (1 - 1 / experts) ** choices)
    each = choices / chosen
    sizes = {(type(c), c.tiles * 8 if isinstance(c, MoeRows) else c.tokens): c for c in candidates}
    if arch == 90 and (each > 6 or choices > MOST_UNSORTED):
        size = next((size for size, _ in MOE_WGMMA_INSTANCES if size >= 1.15 * each), MOE_WGMMA_INSTANCES[-1][0])
        if (MoeWgmma, size) in sizes:
            return sizes[MoeWgmma, size]
    for size in (8, 16, 32) if each <= 5 else (16, 32, 8) if each <= 10 else (32, 16, 8):
        if (MoeRows, size) in sizes:
            return sizes[MoeRows, size]
    return None
