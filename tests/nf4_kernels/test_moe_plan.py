"""Plans of mixtures' GEMMs on CUDA, for devices that need not be there."""

from __future__ import annotations

import itertools
import re

from nf4_kernels import build
from nf4_kernels.plan.moe import MoeGrouped, MoeWarps, MoeWgmma, moe_candidates, plan_moe
from nf4_kernels.plan.moe_rows import (
    MOE_INSTANCES,
    MOE_SMALL_INSTANCES,
    MOST_UNSORTED,
    MoeRows,
    copies_boxes,
    moe_stages,
)
from nf4_kernels.plan.rows import shared_bytes


def test_instances_are_those_compiled_and_have_stages_on_their_gpus_alone() -> None:
    """Kernels of other instances are empty there."""
    source = (build.ROOT / "csrc" / "cuda" / "moe" / "instances.cuh").read_text()
    compiled: set[tuple[int, ...]] = set()
    for tiles, table in re.findall(r"#define NF4_MOE_ROWS_OF_(\d)_TILES? ((?:.*\\\n)*.*)", source):
        compiled |= {(*map(int, one.split(", ")), int(tiles)) for one in re.findall(r"INSTANCE\((.*?)\)", table)}
    assert compiled == {*MOE_INSTANCES, *MOE_SMALL_INSTANCES}
    for (warps, teams, blocks, tiles), nested in itertools.product(
        (*MOE_INSTANCES, *MOE_SMALL_INSTANCES), (False, True)
    ):
        stages, _ = moe_stages(warps, teams, blocks, tiles, nested, shared_bytes(89))
        assert (stages >= 2) == ((warps, teams, blocks, tiles) in MOE_SMALL_INSTANCES)


def test_plans_fit_the_device() -> None:
    for tokens, arch, gated in itertools.product((1, 7, 64, 700, 8192), (80, 86, 89, 90, 100, 120), (False, True)):
        shapes = (
            (8, 128, 1536, 2048),
            (8, 128, 2048, 768),
            (8, 128, 2816, 704),
            (4, 32, 5760, 2880),
            (2, 8, 4096, 14336),
            (1, 1, 64, 64),
        )
        for top_k, experts, n, k in shapes:
            processors = 132 if arch == 90 else 84
            choices = tokens * top_k
            for plan in moe_candidates(tokens, top_k, experts, n, k, arch, processors, True, gated, not gated):
                if isinstance(plan, MoeWgmma):
                    assert arch == 90
                    continue
                if isinstance(plan, MoeGrouped):
                    assert arch != 90
                    continue
                if isinstance(plan, MoeWarps):
                    groups = min(choices, choices // 8 + experts)
                    assert (k % 64, k <= 1024, gated) == (0, True, False)
                    assert choices <= MOST_UNSORTED
                    assert plan.shared_bytes(choices, n) <= shared_bytes(arch)
                    assert plan.held_groups >= (groups if plan.adds else -(-groups // plan.grid) + 1)
                    continue
                assert plan.parts * plan.part_blocks >= k // 64 > (plan.parts - 1) * plan.part_blocks
                assert plan.part_blocks <= plan.warps // plan.teams * plan.blocks
                assert plan.sorted or choices <= MOST_UNSORTED
                assert plan.stages >= 2
                # Thread blocks that share all groups evenly touch no more than are held.
                groups = min(choices, choices // (plan.tiles * 8) + experts)
                assert plan.held_groups >= -(-groups // plan.grid) + 1


def test_every_gpu_from_ampere_on_has_launches_for_gates_and_ups() -> None:
    """If no launch has the whole k, it comes in parts, and the activation is computed where these are added up."""
    shapes = ((8, 128, 1536, 2048), (4, 32, 5760, 2880), (2, 8, 28672, 4096), (8, 256, 4096, 7168), (2, 8, 4096, 14336))
    for arch, tokens, shape in itertools.product((80, 86, 89, 90, 100, 120), (1, 8, 33, 700, 8192), shapes):
        assert plan_moe(tokens, *shape, arch, 84, gated=True) is not None
    whole, parts = (plan_moe(8, *shapes[0], arch, 84, gated=True) for arch in (80, 86))
    assert isinstance(whole, MoeRows)
    assert isinstance(parts, MoeRows)
    assert (whole.parts, parts.parts) == (1, 2)
    # Groups of 8 are the faster ones with little shared memory; many choices are multiplied by dequantized weights.
    assert [plan.tiles for plan in (plan_moe(tokens, *shapes[0], 86, 84, gated=True) for tokens in (8, 300))
            if isinstance(plan, MoeRows)] == [1, 1]  # fmt: skip
    assert plan_moe(2048, *shapes[0], 86, 84, gated=True) == MoeGrouped(64)
    assert isinstance(plan_moe(2048, *shapes[0], 86, 84, gated=True, groups=False), MoeRows)


def test_plan_of_few_and_many_tokens() -> None:
    few, many = (plan_moe(tokens, 8, 128, 1536, 2048, 90, 132, gated=True) for tokens in (1, 8192))
    assert isinstance(few, MoeRows)
    assert few.tiles == 1
    assert isinstance(many, MoeWgmma)
    assert (many.tokens, many.tiled) == (256, True)
    # Down of many small experts: thread blocks add up few choices themselves.
    down, more, most = (plan_moe(tokens, 8, 128, 2048, 768, 90, 132, routed=True) for tokens in (8, 64, 128))
    assert isinstance(down, MoeWarps)
    assert isinstance(more, MoeWarps)
    assert (down.adds, more.adds) == (True, False)
    assert isinstance(most, MoeWgmma)
    assert not isinstance(plan_moe(8, 8, 128, 2048, 768, 90, 132, blocksize=128, routed=True), MoeWarps)
    # Row groups that do not divide evenly are not a thread block's alone.
    uneven = plan_moe(8, 8, 128, 2560, 768, 90, 132, routed=True)
    assert isinstance(uneven, MoeWarps)
    assert not uneven.adds
    # 128 choices an expert: tiles of 256 would be half empty.
    middle = plan_moe(2048, 8, 128, 1536, 2048, 90, 132, gated=True)
    assert isinstance(middle, MoeWgmma)
    assert middle.tokens < 256
    # 6 an expert: boxes, which other block sizes do not fill.
    boxed, other = (plan_moe(90, 8, 128, 1536, 2048, 90, 132, blocksize, gated=True) for blocksize in (64, 128))
    assert isinstance(boxed, MoeRows)
    assert copies_boxes(boxed, 2048, 90, 64)
    assert not copies_boxes(boxed, 2048, 90, 128)
    assert not copies_boxes(boxed, 1024, 90, 64)
    assert isinstance(other, MoeWgmma)
    # Down of GLM-4.7-Flash and of Qwen3-235B-A22B.
    for top_k, experts, n in ((4, 64, 2048), (8, 128, 4096)):
        long = plan_moe(8, top_k, experts, n, 1536, 90, 132, routed=True)
        assert isinstance(long, MoeRows)
        assert copies_boxes(long, 1536, 90, 64)
    # One token: none with K = 2048, where the plan has another form.
    two, four = (plan_moe(1, 8, 128, 1536, k, 90, 132, gated=True) for k in (2048, 4096))
    assert isinstance(two, MoeRows)
    assert isinstance(four, MoeRows)
    assert (copies_boxes(two, 2048, 90, 64), copies_boxes(four, 4096, 90, 64)) == (False, True)
    # 8 an expert: a launch in front would cost more than the gathering.
    eight = plan_moe(128, 8, 128, 1536, 2048, 90, 132, gated=True)
    assert isinstance(eight, MoeWgmma)
    assert (eight.tokens, eight.tiled) == (16, False)
    assert plan_moe(1, 8, 128, 1536, 2048, 75, 40) is None
    assert plan_moe(1, 8, 128, 1536, 100, 90, 132) is None
    assert plan_moe(1, 8, 128, 1536, 2048, 90, 132, blocksize=32) is None
