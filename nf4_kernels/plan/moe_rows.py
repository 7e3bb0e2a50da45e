"""moe_rows: which launches a device can do for a GEMM of experts with few choices, and their workspace."""

from __future__ import annotations

from dataclasses import dataclass

from nf4_kernels.plan.rows import GROUP_ROWS, shared_bytes

# (warps, teams, k blocks of a warp, token tiles of 8): the instances of csrc/cuda/moe/instances.cuh.
MOE_INSTANCES = (
    *((16, 1, blocks, 1) for blocks in (1, 2, 3, 4, 8)),
    *((16, teams, blocks, 1) for teams in (2, 4) for blocks in (2, 3, 4)),
    *((16, 1, blocks, 2) for blocks in (1, 2, 3, 4)),
    *((16, 2, blocks, 2) for blocks in (2, 3)),
    *((16, 1, blocks, 4) for blocks in (1, 2)),
)
# The same for devices whose blocks have 99 KB of shared memory.
MOE_SMALL_INSTANCES = ((8, 1, 1, 1), (8, 1, 2, 1), (4, 1, 2, 2))
# Those that copy weights in boxes where they can, on Hopper.
MOE_BOXED = ((16, 1, 4, 1), (16, 2, 3, 1), (16, 2, 4, 1))
MOST_UNSORTED = 1024
"""Choices that thread blocks group themselves."""
_SMALL_SHARED_BYTES = 99 << 10


def capacity(choices: int, experts: int, size: int) -> int:
    """The most groups that there can be: moecapacity() of csrc/cuda/moe/args.cuh."""
    return -(-min(choices // size + min(experts, choices), choices) // 4) * 4


def list_bytes(choices: int, experts: int, size: int) -> int:
    """Bytes of a list of groups: list_bytes() of csrc/cuda/moe/args.cuh."""
    return -(-(4 + capacity(choices, experts, size) * (1 + size)) * 4 // 256) * 256


@dataclass(frozen=True)
class MoeRows:
    """moe_rows: the weight rows of chosen experts stream past their choices; the fields are MoeRowsPlan of params.h."""

    warps: int
    teams: int
    blocks: int
    tiles: int
    stages: int
    parts: int
    part_blocks: int
    grid: int
    held_groups: int
    sorted: bool
    adds: bool

    def workspace_bytes(self, choices: int, x_rows: int, experts: int, n: int, k: int, routed: bool) -> int:
        """The list of groups, if any, and float32 results that a launch behind adds up."""
        listed = list_bytes(choices, experts, self.tiles * 8) if self.sorted else 0
        return listed + (self.parts * choices * n * 4 if (routed or self.parts > 1) and not self.adds else 0)

    def __str__(self) -> str:
        parts = "" if self.parts == 1 else f", k in {self.parts} parts"
        return (
            f"moe_rows: {self.teams} x {self.warps // self.teams} warps x {self.blocks} blocks, groups of {self.tiles * 8}"
            f"{', sorted' if self.sorted else ''}{', adds' if self.adds else ''}{parts}, {self.stages} stages, "
            f"grid {self.grid}"
        )


def moe_stages(warps: int, teams: int, blocks: int, tiles: int, nested: bool, shared: int) -> tuple[int, int]:
    """Number of ring stages that fit, and bytes of one: MoeLayout of csrc/cuda/moe/rows_layout.cuh."""
    unit_blocks = warps // teams * blocks
    scale_pitch = ((unit_blocks * (1 if nested else 4) + 30) // 16 | 1) * 16
    stage = teams * GROUP_ROWS * (unit_blocks * 32 + 32 + scale_pitch)
    fixed = 65536 + 1024 + 2 * warps * tiles * 512 + 256 + GROUP_ROWS * tiles * 32
    return max(0, min(7, 65536 // (teams * unit_blocks * 128), (shared - fixed) // stage)), stage


def moe_rows_instances(arch: int) -> tuple[tuple[int, int, int, int], ...]:
    """The instances that are compiled for a GPU; on Hopper others are faster for large groups and for short rows."""
    if shared_bytes(arch) == _SMALL_SHARED_BYTES:
        return MOE_SMALL_INSTANCES
    return tuple(one for one in MOE_INSTANCES if arch != 90 or (one[1] <= 2 and one[3] == 1))


def moe_rows_candidates(
    choices: int, experts: int, k: int, arch: int, multiprocessors: int, nested: bool, gated: bool, routed: bool
) -> list[MoeRows]:
    """The moe_rows launches that a device can do: for groups of each size and each number of teams the smallest that fit.

    Gates and ups have k in parts, which a launch behind adds up, only if no launch does without; not on Hopper, which
    has moe_wgmma.
    """
    k_blocks, shared = k // 64, shared_bytes(arch)
    instances = moe_rows_instances(arch)
    found: dict[tuple[int, int], MoeRows] = {}
    for warps, teams, blocks, tiles in sorted(instances, key=lambda instance: instance[2]):
        unit_blocks = warps // teams * blocks
        parts = -(-k_blocks // unit_blocks)
        before = found.get((tiles, teams))
        if before is not None and before.parts <= parts:
            continue
        plan = _plan((warps, teams, blocks, tiles), choices, experts, k_blocks, multiprocessors, nested, routed, shared)
        if plan is not None:
            found[tiles, teams] = plan
    whole = [plan for plan in found.values() if plan.parts == 1]
    return whole if gated and (whole or arch == 90) else list(found.values())


def _plan(
    instance: tuple[int, int, int, int],
    choices: int,
    experts: int,
    k_blocks: int,
    multiprocessors: int,
    nested: bool,
    routed: bool,
    shared: int,
) -> MoeRows | None:
    """The launch of an instance; None where its ring does not fit in the shared memory."""
    warps, teams, blocks, tiles = instance
    size, unit_blocks = tiles * 8, warps // teams * blocks
    parts = -(-k_blocks // unit_blocks)
    part_blocks = k_blocks if parts == 1 else min(unit_blocks, -(-k_blocks // parts // 4) * 4)
    held = -(-capacity(choices, experts, size) // multiprocessors) + 2
    adds = routed and parts == 1 and choices <= size
    held = max(held, choices) if adds else held
    held += held % 2
    stages, _ = moe_stages(warps, teams, blocks, tiles, nested, shared - held * (size + 1) * 4)
    if stages < 2:
        return None
    # The groups are found where the ring is, which has codes alone where they are copied in boxes.
    scratch = 128 + experts * 4 + (-(-choices // 32) * experts + 1) // 2 * 4
    is_sorted = choices > MOST_UNSORTED or (choices > 32 and scratch > stages * teams * unit_blocks * 512)
    return MoeRows(warps, teams, blocks, tiles, stages, parts, part_blocks, multiprocessors, held, is_sorted, adds)


def copies_boxes(plan: MoeRows, k: int, arch: int, blocksize: int) -> bool:
    """Whether the launch copies weights in boxes: a unit's k is the whole k, and each 64 weights have a scale."""
    form, whole = (plan.warps, plan.teams, plan.blocks, plan.tiles), plan.warps // plan.teams * plan.blocks == k // 64
    return arch == 90 and blocksize == 64 and whole and form in MOE_BOXED
