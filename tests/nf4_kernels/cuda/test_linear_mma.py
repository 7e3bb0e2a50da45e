"""linear_mma, which GPUs without wgmma use and all from capability 8.0 on can run, against the oracle in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from nf4_kernels import cuda
from nf4_kernels.cuda import launches
from nf4_kernels.cuda.device import arch
from nf4_kernels.cuda.workspace import workspace_on
from nf4_kernels.params import ACTIVATIONS
from nf4_kernels.plan import MMA_COSTS, NORM_K, WHOLE_INSTANCES, WIDE_COSTS, Mma, mma_candidates, plan, wide_candidates
from tests.nf4_kernels.cuda import test_cuda, test_fused, test_gated
from tests.nf4_kernels.cuda.cuda_weights import DEVICE, ON_GPU, TOLERANCE, Random, random_weight, relative_error
from tests.nf4_kernels.cuda.test_shards_cuda import part_of_k, part_of_n

pytestmark = ON_GPU
BFLOAT16 = torch.bfloat16
HALVES = (torch.bfloat16, torch.float16)
WARPS = {tokens: warps for warps, tokens in MMA_COSTS}
"""The warps of each instance, by the tokens of its tile."""
MANY = (
    (64, 64, 64, True, False),
    (1, 64, 512, True, False),
    (63, 192, 128, True, True),
    (1000, 4160, 64, True, True),
    (3000, 1024, 64, True, False),
    (257, 8192, 256, False, False),
    (520, 2048, 64, False, False),
)
"""Weights: n, k, blocksize, whether scales are nested, whether each 256 blocks have an offset."""
SOME_WARPS = ((2, 2, 4), (3, 1, 1))
"""Row warps, k warps and loaders; for as many of the k warps as an instance can have, each has room."""


def planned_arch() -> int:
    """The capability to plan for: this GPU's own, but 8.0 on Hopper, whose own plans have wgmma in linear_mma's place."""
    own = arch(DEVICE)
    return 80 if own == 90 else own


def launch(tokens: int, m: int, n: int, k: int, blocks: int) -> Mma:
    """An instance's launch of that many thread blocks, of no more than there are k steps."""
    return Mma(tokens, WARPS[tokens], min(blocks, -(-n // 256) * -(-m // tokens) * (k // 64)))


def whole(instance: tuple[int, int], warps: tuple[int, int, int], m: int, n: int, multiprocessors: int = 132) -> Mma:
    """A launch of whole tiles, a few for each thread block if there are few multiprocessors."""
    most, tokens = instance
    row_warps, k_warps, loaders = warps
    warps = row_warps, min(k_warps, WHOLE_INSTANCES[instance].max_k_warps), loaders
    tiles = -(-n // Mma(tokens, most, 1, *warps).tile_rows) * -(-m // tokens)
    return Mma(tokens, most, -(-tiles // -(-tiles // multiprocessors)), *warps)


def wide(row_tiles: int, tokens: int, m: int, n: int, k: int, parts: int = 1) -> Mma:
    """A launch of wide tiles, each of which so many thread blocks share if it has as many k steps."""
    tiles = -(-n // (row_tiles * 64)) * -(-m // tokens)
    return Mma(tokens, row_tiles, tiles * max(1, min(parts, k // 64, 132 // tiles)))


def warps_of(instance: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Row warps, k warps and loaders: each number of loaders with one k warp and with the most, in all the room there is."""
    most, max_k_warps = instance[0], WHOLE_INSTANCES[instance].max_k_warps
    found = {(1, 2, 4), (2, 1, 1)}
    for loaders, k_warps in itertools.product((1, 2, 4), (1, max_k_warps)):
        row_warps = max(1, (most - loaders) // k_warps)
        found.add((row_warps, min(k_warps, (most - loaders) // row_warps), loaders))
    return sorted(found)


def check(
    w: Random, choice: Mma, m: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, size: float = 1.0
) -> None:
    """The launch's sums are right, on poisoned memory, twice the same bits, and leave all counters zero.

    size: of the activations.
    """
    with monkeypatch.context() as patch:
        patch.setattr(launches, "_plan", lambda *_: choice)
        x = torch.randn(m, w.k, device=DEVICE, dtype=dtype) * size
        workspace = workspace_on(DEVICE)
        assert workspace is not None
        workspace[0].fill_(0xFF)
        torch.full((m, w.n), float("nan"), device=DEVICE, dtype=dtype)
        got = w.linear(x)
        exact = x.double() @ w.exact().T
        # A few sums may all be near zero: then their error counts against the size that sums have.
        usual = float(x.double().norm() * w.exact().norm()) / w.k**0.5
        error = float((got.double() - exact).norm()) / max(float(exact.norm()), usual)
        assert error < TOLERANCE[dtype] * (3 if m * w.n < 64 else 1), (str(choice), w.weight.shape, m, dtype, error)
        assert torch.equal(w.linear(x), got), (str(choice), w.weight.shape, m, dtype)
        assert not workspace[1].any()


@pytest.mark.parametrize("tokens", WARPS)
@pytest.mark.parametrize("dtype", HALVES)
def test_every_instance_however_its_work_is_split(
    dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that are whole, in two, in a few and in so many parts that most of them have no share of the reduction.

    131 thread blocks have parts of two tiles each, and most of 132 have equal parts of one.
    """
    for n, k, blocksize, nested, offsets in MANY:
        w = random_weight(n, k, blocksize, nested, offsets)
        for m in (1, tokens - 1, tokens, tokens + 1, 2 * tokens + 3):
            for blocks in (1, 7, 131, 132):
                check(w, launch(tokens, m, n, k, blocks), m, dtype, monkeypatch)


@pytest.mark.parametrize("instance", WHOLE_INSTANCES)
@pytest.mark.parametrize("dtype", HALVES)
def test_whole_tiles_of_every_shape(
    dtype: torch.dtype, instance: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With some token tiles, some tiles for a thread block, and rows and k blocks that do not fill the last ones."""
    tokens = instance[1]
    for n, k, blocksize, nested, offsets in MANY:
        w = random_weight(n, k, blocksize, nested, offsets)
        for warps, m in itertools.product(warps_of(instance), (1, tokens - 1, 2 * tokens + 3)):
            for multiprocessors in (132, 3):
                check(w, whole(instance, warps, m, n, multiprocessors), m, dtype, monkeypatch)


@pytest.mark.parametrize(("row_tiles", "tokens"), WIDE_COSTS)
@pytest.mark.parametrize("dtype", HALVES)
def test_wide_tiles(dtype: torch.dtype, row_tiles: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and in two, a few and so many parts that most of them have no share of the reduction."""
    for n, k, blocksize, nested, offsets in MANY:
        w = random_weight(n, k, blocksize, nested, offsets)
        for m in (1, tokens - 1, tokens, 2 * tokens + 3):
            for parts in (1, 2, 7, 132):
                check(w, wide(row_tiles, tokens, m, n, k, parts), m, dtype, monkeypatch)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("blocksize", [64, 128, 256, 512, 1024, 2048, 4096])
def test_every_blocksize(blocksize: int, nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, k in [(100, 4160), (40, 1024), (33, 8192), (600, 64)]:
        w = random_weight(n, k, blocksize, nested, offsets=nested)
        for tokens, blocks in itertools.product((8, 48), (5, 132)):
            check(w, launch(tokens, tokens - 3, n, k, blocks), tokens - 3, BFLOAT16, monkeypatch)
        for instance, warps in itertools.product(WHOLE_INSTANCES, SOME_WARPS):
            check(w, whole(instance, warps, instance[1] - 3, n), instance[1] - 3, BFLOAT16, monkeypatch)
        for (row_tiles, tokens), parts in itertools.product(WIDE_COSTS, (1, 3)):
            check(w, wide(row_tiles, tokens, tokens - 3, n, k, parts), tokens - 3, BFLOAT16, monkeypatch)


@pytest.mark.parametrize("dtype", HALVES)
def test_blocks_of_zeros(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose scale is zero, in which no sum can be expressed: the first one, the last one, and some between."""
    w = random_weight(200, 4160, nested=False)
    w.weight.absmax.view(200, -1)[:, ::8] = 0
    for instance, warps in itertools.product(WHOLE_INSTANCES, SOME_WARPS):
        check(w, whole(instance, warps, instance[1], w.n), instance[1], dtype, monkeypatch)


def test_sums_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles whose sums are in units of the latest scale, too, and with k that ends within a step."""
    for n, k in [(63, 64), (200, 4160)]:
        for size in (1e-25, 1e25):
            w = random_weight(n, k)
            for instance, warps in itertools.product(WHOLE_INSTANCES, SOME_WARPS):
                check(w, whole(instance, warps, instance[1], n), instance[1], BFLOAT16, monkeypatch, size)
            for row_tiles, tokens in WIDE_COSTS:
                check(w, wide(row_tiles, tokens, tokens, n, k, 2), tokens, BFLOAT16, monkeypatch, size)


@pytest.mark.parametrize("around", [(0, 4), (300, 0), (1, 2), (128, 384), (7, 250)])
def test_shards(around: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for n, k in [(200, 8192), (333, 1024), (63, 192)]:
        for w in (part_of_k(n, k, *around), part_of_n(n, k, around[0])):
            for tokens, dtype in itertools.product((8, 24, max(WARPS)), HALVES):
                for blocks in (5, 132):
                    check(w, launch(tokens, tokens + 1, n, k, blocks), tokens + 1, dtype, monkeypatch)
            for instance, dtype, warps in itertools.product(WHOLE_INSTANCES, HALVES, SOME_WARPS):
                check(w, whole(instance, warps, instance[1] + 1, n), instance[1] + 1, dtype, monkeypatch)
            for (row_tiles, tokens), dtype, parts in itertools.product(WIDE_COSTS, HALVES, (1, 5)):
                check(w, wide(row_tiles, tokens, tokens + 1, n, k, parts), tokens + 1, dtype, monkeypatch)


@pytest.mark.parametrize("m", [1, 2, 3, 8, 13, 16, 24, 31, 33, 48, 64, 75, 96, 127, 128, 129, 256])
def test_whatever_is_planned(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a GPU without wgmma, and twenty launches among which was chosen."""
    for n, k in [(64, 64), (1000, 4160), (1024, 2048), (4096, 4096)]:
        w = random_weight(n, k)
        for multiprocessors in (132, 20):
            found = [*mma_candidates(m, n, k, multiprocessors), *wide_candidates(m, n, k, multiprocessors)]
            for choice in random.Random(m).sample(found, min(len(found), 20)):
                check(w, choice, m, BFLOAT16, monkeypatch)
        planned = plan(m, n, k, planned_arch(), 132)
        monkeypatch.setattr(launches, "_plan", lambda *_, planned=planned: planned)
        x = torch.randn(m, k, device=DEVICE, dtype=torch.float16)
        usual = float(x.double().norm() * w.exact().norm()) / k**0.5
        error = float((w.linear(x).double() - x.double() @ w.exact().T).norm())
        assert error < 3 * TOLERANCE[torch.float16] * usual, (str(planned), n, k)


def fused_launches(n: int, k: int) -> Iterator[tuple[Mma, int]]:
    """Instances of few and many tokens, with whole and split tiles, and the tokens of each launch."""
    for tokens in (8, 32, max(WARPS)):
        for m, blocks in ((tokens, 132), (2 * tokens + 1, 5), (tokens - 1, 3), (2 * tokens, 1)):
            yield launch(tokens, m, n, k, blocks), m
    for instance in WHOLE_INSTANCES:
        tokens = instance[1]
        for warps, m, multiprocessors in zip(SOME_WARPS, (tokens, 2 * tokens + 1), (132, 2), strict=True):
            yield whole(instance, warps, m, n, multiprocessors), m
    for row_tiles, tokens in ((4, 80), (4, 112), (4, 128)):
        for m, parts in ((tokens, 1), (2 * tokens + 1, 3)):
            yield wide(row_tiles, tokens, m, n, k, parts), m


@pytest.mark.parametrize(("n", "k"), [(1000, 4160), (193, 448), (63, NORM_K), (64, 64)])
def test_bias_residual_and_norm(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = random_weight(n, k)
    for choice, m in fused_launches(n, k):
        monkeypatch.setattr(launches, "_plan", lambda *_, choice=choice: choice)
        test_fused.check(w, m, str(choice))
    test_fused.check(w, m, str(choice), torch.float16)


@pytest.mark.parametrize(("n", "k"), [(1024, 4160), (208, 448), (144, NORM_K), (512, 64)])
def test_gated_activation(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the epilogue, of whole and of split tiles."""
    monkeypatch.setattr(cuda, "gated", None)
    w = random_weight(n, k)
    for choice, m in fused_launches(n, k):
        monkeypatch.setattr(launches, "_plan", lambda *_, choice=choice: choice)
        test_gated.check(w, m, choice, tiles=(8, 64) if n % 512 == 0 else (), same_sums=False)
        check_gated_sums(w, m, choice)


def check_gated_sums(w: Random, m: int, choice: Mma) -> None:
    """The gated activation is near the one of sums in float64, on poisoned memory."""
    x = (torch.randn(m, w.k, device=DEVICE) / float(w.exact().norm()) * w.n**0.5).to(BFLOAT16)
    bias = torch.randn(w.n, device=DEVICE, dtype=BFLOAT16)
    for more, activation in itertools.product((None, bias), ACTIVATIONS):
        gate, up = (x.double() @ w.exact().T + (0.0 if more is None else more.double())).chunk(2, -1)
        exact = test_gated.activated(gate, activation) * up
        error = relative_error(test_gated.gated(w, x, more, None, activation), exact)
        # The sums are rounded, then the activation, then the product.
        assert error < 2 * TOLERANCE[BFLOAT16], (str(choice), m, more is not None, activation, error)


@pytest.mark.parametrize("m", [1, 16, 64, 128, 256])
def test_a_chain_in_a_graph(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches share a workspace and its counters, and take turns with linear_rows and cuBLAS."""
    monkeypatch.setattr(launches, "_properties", lambda _: (planned_arch(), 132))
    test_cuda.test_a_chain_of_gemms_in_a_graph(m)


@pytest.mark.parametrize("m", [8, 32, 96, 128])
def test_results_do_not_change_from_run_to_run(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, k in [(5120, 25600), (1024, 8192), (25600, 5120)]:
        *_, choice = (wide_candidates if m > 64 else mma_candidates)(m, n, k, 132)
        monkeypatch.setattr(launches, "_plan", lambda *_, choice=choice: choice)
        w = random_weight(n, k)
        x = torch.randn(m, k, device=DEVICE, dtype=BFLOAT16)
        first = w.linear(x)
        different = torch.zeros((), device=DEVICE)
        for _ in range(200):
            different += (w.linear(x) != first).any()
        assert different == 0, (n, k, m)
        assert relative_error(first, x.double() @ w.exact().T) < TOLERANCE[BFLOAT16]


def test_what_a_launch_cannot_do_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    w = random_weight(64, 128)
    x = torch.randn(2, 128, device=DEVICE, dtype=BFLOAT16)
    stream_k = (Mma(8, 4, 1), Mma(40, 8, 1), Mma(8, WARPS[8], 3), Mma(8, WARPS[8], 0))
    whole = (Mma(8, 16, *of) for of in ((1, 16, 1, 1), (1, 1, 9, 1), (3, 2, 1, 4), (1, 1, 1, 3), (1, 1, 0, 1)))
    for wrong in (*stream_k, *whole, Mma(16, 16, 5, 1, 1, 1), Mma(80, 2, 1), Mma(128, 4, 3), Mma(80, 4, 3)):
        monkeypatch.setattr(launches, "_plan", lambda *_, wrong=wrong: wrong)
        with pytest.raises(cuda.KernelError, match="mma"):
            w.linear(x)
