"""The choice of kernel: a pure function, and the CUDA library that must hold what it chooses."""

from __future__ import annotations

import itertools
import json
import re
import statistics

import pytest

from nf4_kernels import build
from nf4_kernels.cuda import library
from nf4_kernels.plan import (
    COUNTERS,
    INSTANCES,
    MAX_ROWS_TOKENS,
    MMA_COSTS,
    WGMMA_INSTANCES,
    WGMMA_TOKENS,
    WHOLE_INSTANCES,
    WIDE_COSTS,
    WORKSPACE_BYTES,
    Dequantize,
    Mma,
    Rows,
    Wgmma,
    plan,
    rows_stages,
)
from nf4_kernels.plan.mma import mma_candidates, mma_cost
from nf4_kernels.plan.mma_wide import wide_cost
from nf4_kernels.plan.posed import posed_dequantize_cost
from nf4_kernels.plan.rows import CLUSTERS, GROUP_ROWS, HALF_ROWS, rows_candidates
from nf4_kernels.plan.wgmma import WGMMA_COSTS, wgmma_candidates

ROOT = build.ROOT.parent
SOURCES = build.ROOT / "csrc" / "cuda"
SHAPES = ((25600, 5120), (5120, 25600), (8192, 28672), (1024, 8192), (1, 64), (1000, 4160))


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("nested", [False, True])
def test_rows_plans_cover_k_and_fit_the_device(n: int, k: int, arch: int, nested: bool) -> None:
    for m in range(1, 33):
        choice = plan(m, n, k, arch, 132, nested=nested)
        if not isinstance(choice, Rows):
            assert isinstance(choice, Wgmma if arch == 90 else Mma | Dequantize)
            continue
        assert m <= MAX_ROWS_TOKENS
        assert (choice.warps, choice.blocks) in INSTANCES
        assert choice.part_blocks <= choice.warps * choice.blocks
        parts = choice.cluster * choice.passes
        assert (parts - 1) * choice.part_blocks < k // 64 <= parts * choice.part_blocks
        assert 1 <= choice.grid <= min(132, -(-n // 16) * choice.cluster)
        assert choice.grid % choice.cluster == 0
        assert choice.passes == 1 or choice.chunk <= 16
        assert 2 <= choice.stages <= 7


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("arch", [80, 86, 100, 120])
@pytest.mark.parametrize("multiprocessors", [20, 108, 170])
def test_without_wgmma_nothing_costs_more_than_dequantization(n: int, k: int, arch: int, multiprocessors: int) -> None:
    for m in (*range(1, 34), 48, 63, 64, 65, 96, 100, 128, 129, 200, 2000):
        for normalised in (False, True):
            choice = plan(m, n, k, arch, multiprocessors, normalised=normalised)
            dequantized = posed_dequantize_cost(m, n, k, multiprocessors)
            if isinstance(choice, Rows):
                assert arch == 100
                assert not normalised or choice.passes == 1
            elif isinstance(choice, Mma):
                wide = choice.is_wide
                assert dequantized > (
                    wide_cost(choice, m, n, k, multiprocessors) if wide else mma_cost(choice, m, n, k)
                )
                check_mma(choice, m, n, k, multiprocessors)
            else:
                assert isinstance(choice, Dequantize)


def check_mma(choice: Mma, m: int, n: int, k: int, multiprocessors: int) -> None:
    """The launch is one that csrc/cuda/mma_sm80/ has: of stream-K, of whole or of wide tiles."""
    tiles = -(-n // choice.tile_rows) * -(-m // choice.tokens)
    if choice.is_wide:
        assert (choice.warps, choice.tokens) in WIDE_COSTS
        assert choice.grid == tiles or (
            choice.grid % tiles == 0 and choice.grid <= min(multiprocessors, tiles * (k // 64))
        )
        return
    if not choice.row_warps:
        assert (choice.warps, choice.tokens) in MMA_COSTS
        assert tiles <= COUNTERS
        assert 1 <= choice.grid <= min(multiprocessors, tiles * (k // 64))
        return
    instance = WHOLE_INSTANCES[choice.warps, choice.tokens]
    assert 1 <= choice.grid <= multiprocessors
    assert choice.grid == -(-tiles // -(-tiles // choice.grid))
    assert choice.loaders in (1, 2, 4)
    assert choice.row_warps * choice.k_warps + choice.loaders <= choice.warps
    assert 1 <= choice.k_warps <= instance.max_k_warps


def test_k_warps_are_no_more_than_pay() -> None:
    """Others would take as many steps of 256 k."""

    def k_warps(k: int) -> set[int]:
        return {mma.k_warps for mma in mma_candidates(8, 4096, k, 132) if mma.warps == 16 and mma.row_warps == 2}

    assert k_warps(64) == {1}
    assert k_warps(4096) == {4, 6}
    assert k_warps(5120) == {4, 5}


def test_linear_mma_is_for_gpus_without_wgmma() -> None:
    for m in (1, 8, 32, 64, 100, 128):
        assert not isinstance(plan(m, 28672, 4096, 90, 132), Mma)
        assert isinstance(plan(m, 28672, 4096, 75, 68), Dequantize)
        for arch in (86, 120):
            assert isinstance(plan(m, 28672, 4096, arch, 82, blocksize=32), Dequantize)
            assert isinstance(plan(m, 28672, 4100, arch, 82), Dequantize)
    for arch in (80, 86, 87, 89, 100, 103, 120, 121):
        assert isinstance(plan(64, 28672, 4096, arch, 82), Mma)
    for m in (*range(1, 34), 48, 64, 96, 128):
        # As much shared memory, and the same costs.
        assert plan(m, 28672, 4096, 120, 82) == plan(m, 28672, 4096, 86, 82)


@pytest.mark.parametrize("arch", [80, 86])
def test_plans_take_hardly_longer_than_what_was_measured_to_be_fastest(arch: int) -> None:
    """On an H200 that posed, twelve weights, 1 to 2000 tokens."""
    found = json.loads((ROOT / "bench" / "results" / f"posed-{arch}-nvidia-h200.json").read_text())
    lost = []
    for row in found["rows"]:
        choice = plan(row["m"], row["n"], row["k"], arch, found["multiprocessors"])
        times = {Mma(*fields): us for *fields, us in row["linear_mma"]}
        took = row["dequantize"] if isinstance(choice, Dequantize) else times[choice]
        lost.append(took / min([*times.values(), row["dequantize"]]))
        assert lost[-1] < 1.13, (row, str(choice))
    assert statistics.mean(lost) < 1.01


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_wgmma_plans_fit_the_workspace(n: int, k: int) -> None:
    assert isinstance(plan(WGMMA_TOKENS.stop, n, k, 90, 132), Dequantize)
    for m in WGMMA_TOKENS:
        choice = plan(m, n, k, 90, 132)
        if not isinstance(choice, Wgmma):
            continue
        assert (choice.tokens, choice.groups) in WGMMA_INSTANCES
        assert m > 256 or choice.workspace_bytes(m, n, k) <= WORKSPACE_BYTES
        tiles = -(-n // (choice.groups * 64)) * -(-m // choice.tokens)
        assert tiles * choice.groups <= COUNTERS
        steps = -(-k // 256)
        # Blocks for which every SM has room, or one for each whole tile.
        assert 1 <= choice.grid <= min(132, tiles * steps) or choice.grid == tiles
        if choice.first_split_steps:
            # Every tile is split into as many parts; none is empty, and the first one is not the shortest.
            parts, left = divmod(choice.grid, tiles)
            assert left == 0
            assert parts > 1
            assert parts - 1 <= steps - choice.first_split_steps <= (parts - 1) * choice.first_split_steps


def test_large_weights_and_tens_of_rows_go_to_wgmma_on_hopper_alone() -> None:
    for m in (16, 32, 64, 100, 128, 256, 512):
        assert isinstance(plan(m, 25600, 5120, 90, 132), Wgmma)
        assert not isinstance(plan(m, 25600, 5120, 100, 132), Wgmma)
        assert not isinstance(plan(m, 25600, 5120, 90, 132, blocksize=32), Wgmma)


def test_the_reducing_block_of_a_split_tile_ends_last_where_all_would_end_together() -> None:
    choice = plan(64, 8192, 8192, 90, 132)
    assert isinstance(choice, Wgmma)
    assert choice.grid == 128
    assert choice.first_split_steps > 32 / 2
    assert str(choice) == "wgmma: 64 tokens x 128 rows, grid 128, 17 k steps in a tile's first part"
    # stream-K: partial sums are there before the reducing blocks come to them.
    choice = plan(64, 25600, 5120, 90, 132)
    assert isinstance(choice, Wgmma)
    assert choice.first_split_steps == 0


@pytest.mark.parametrize(
    ("m", "tokens"),
    [(48, 48), (80, 80), (97, 112), (129, 136), (160, 160), (161, 176), (200, 200), (225, 232), (241, 256), (300, 152)],
)
def test_large_weights_have_the_smallest_tiles_that_hold_the_tokens(m: int, tokens: int) -> None:
    for n, k in ((25600, 5120), (5120, 25600), (14336, 4096), (8192, 29568)):
        choice = plan(m, n, k, 90, 132)
        assert isinstance(choice, Wgmma)
        assert choice.tokens == tokens


def test_a_launch_without_a_reduction_is_not_free() -> None:
    """Weights of few k steps and rows, as small models and shards have them, whose tiles need not be split."""
    for n, k in ((4096, 1024), (6144, 1024), (12288, 2048), (4096, 2048)):
        for m in (40, 48, 64, 80, 112, 128):
            choice = plan(m, n, k, 90, 132)
            assert isinstance(choice, Wgmma)
            assert choice.groups == 2, (m, n, k)
    assert all(costs.launch > 0 for costs in WGMMA_COSTS.values())


def test_of_instances_with_as_many_tiles_the_smallest_is_a_candidate() -> None:
    for m in (20, 65, 96, 130, 250, 270, 300, 513, 900):
        found: dict[tuple[int, int], set[int]] = {}
        for choice in wgmma_candidates(m, 25600, 5120, 132):
            found.setdefault((choice.groups, -(-m // choice.tokens)), set()).add(choice.tokens)
        for (groups, tiles), tokens in found.items():
            assert len(tokens) == 1
            whole = [size for size, of in WGMMA_INSTANCES if of == groups and -(-m // size) == tiles]
            # Tiles of fewer than 80 tokens are for two tiles at most.
            assert tokens == {min(size for size in whole if tiles <= 2 or size >= 80)}, (m, groups, tiles)


def test_a_thousand_tokens_of_many_k_go_tile_by_tile() -> None:
    choice = plan(1024, 8192, 28672, 90, 132)
    assert choice == Wgmma(256, 2, 64 * 4)
    # No tile is split, so there are activations to be kept and no sums.
    assert choice.workspace_bytes(1024, 8192, 28672) == 1024 * 28672 * 2
    assert Wgmma(256, 2, 132).workspace_bytes(1024, 8192, 28672) == 1024 * 28672 * 2 + 132 * 128 * 256 * 4


def test_what_rows_cannot_do_is_dequantized() -> None:
    for m, k, arch, blocksize in [
        (500, 5120, 80, 64),
        (1000, 5120, 90, 64),
        (1, 5000, 90, 64),
        (1, 5120, 75, 64),
        (1, 5120, 90, 32),
    ]:
        assert isinstance(plan(m, 1024, k, arch, 132, blocksize), Dequantize)


def test_dequantized_slices_cover_small_and_large_weights() -> None:
    assert plan(4096, 1000, 4160, 90, 132) == Dequantize(1000)
    choice = plan(4096, 25600, 5120, 90, 132)
    assert isinstance(choice, Dequantize)
    assert 0 < choice.rows < 25600


@pytest.mark.parametrize("multiprocessors", [132, 108, 9])
def test_runs_are_fewer_only_where_the_longest_is_no_longer(multiprocessors: int) -> None:
    """In half groups, which is how runs are divided. Without it a launch would have a run for each multiprocessor."""
    fewer = 0
    for n in (8, 520, 1024, 4096, 5120, 6144, 8192, 10240, 14336, 25600, 28672, 51200, 57344):
        halves, groups = -(-n // HALF_ROWS), -(-n // GROUP_ROWS)
        for rows in rows_candidates(n, 4096, 90, multiprocessors, True):
            runs, most = rows.grid // rows.cluster, min(int(multiprocessors * CLUSTERS[rows.cluster]), groups)
            assert -(-halves // runs) == -(-halves // most)
            assert 0.95 * most <= runs <= most
            assert rows.chunk * runs * GROUP_ROWS >= n or rows.passes > 1
            fewer += runs < most
    assert fewer or multiprocessors == 9


def test_the_instances_are_those_compiled() -> None:
    def compiled(file: str, numbers: int) -> set[tuple[int, ...]]:
        """The first numbers of each instance in a source."""
        found = re.findall(r"NF4_INSTANCE\((\d[\d, ]*)", (SOURCES / file).read_text())
        return {tuple(map(int, one.split(", ")[:numbers])) for one in found}

    assert compiled("rows/linear_rows.cu", 2) == set(INSTANCES)
    assert compiled("wgmma_sm90/instances.cuh", 2) == set(WGMMA_INSTANCES)
    tiles = {(warps, tokens // 8) for warps, tokens in MMA_COSTS}
    assert compiled("mma_sm80/instances.cuh", 2) == tiles
    whole = {(warps, instance.row_tiles, tokens // 8) for (warps, tokens), instance in WHOLE_INSTANCES.items()}
    assert compiled("mma_sm80/whole/linear_mma_whole.cu", 3) == whole
    wide = {(row_tiles, tokens // 16) for row_tiles, tokens in WIDE_COSTS}
    assert compiled("mma_sm80/wide/linear_mma_wide.cu", 2) == wide


def test_every_instance_has_stages() -> None:
    for (warps, blocks), nested in itertools.product(INSTANCES, (False, True)):
        assert rows_stages(warps, blocks, nested) >= 2


def test_the_cuda_library_loads_where_it_was_built() -> None:
    if not (build.LIBRARIES / "libnf4_cuda.so").exists():
        pytest.skip("the CUDA library was not built here (no nvcc)")
    loaded = library.library()
    assert not isinstance(loaded, str), loaded
    assert loaded.nf4_cuda_error(0) == b"no error"
