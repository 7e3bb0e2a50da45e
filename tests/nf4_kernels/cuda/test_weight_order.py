"""The weight order: what a launch is told of the next weight, and that results do not depend on it."""

from __future__ import annotations

import gc

import pytest
import torch

from nf4_kernels import Weight, cuda, prefetch_next
from nf4_kernels.cuda import launches
from nf4_kernels.cuda.weight_order import next_weight
from nf4_kernels.plan import HALF_ROWS, Rows, plan
from tests.nf4_kernels.cuda.cuda_weights import gpu


def random_weight(n: int, k: int, nested: bool = True, blocksize: int = 64, device: str = "cpu") -> Weight:
    """A fresh weight; a nested one has an offset for every 256 blocks, as joined projections have."""
    blocks = n * k // blocksize
    packed = torch.randint(0, 256, (n * k // 2,), dtype=torch.uint8, device=device)
    if not nested:
        return Weight(packed, (n, k), torch.rand(blocks, device=device), blocksize)
    codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device=device)
    absmax = torch.rand(-(-blocks // 256), device=device)
    table = torch.randn(256, device=device).sort().values
    return Weight(packed, (n, k), absmax, blocksize, codes, table, torch.randn_like(absmax))


def test_the_last_word_counts_until_it_is_taken_back() -> None:
    first, second, third = (random_weight(16, 64) for _ in range(3))
    address = first.packed.data_ptr()
    assert next_weight(address) is None
    prefetch_next(first, second)
    prefetch_next(first, third)
    found = next_weight(address)
    assert found is not None
    assert found.packed == third.packed.data_ptr()
    assert next_weight(third.packed.data_ptr()) is None
    prefetch_next(first, None)
    assert next_weight(address) is None


@pytest.mark.parametrize("gone", ["weight", "following", "its scales"])
def test_nothing_is_said_of_memory_that_is_gone(gone: str) -> None:
    first, second = random_weight(16, 4096), random_weight(16, 4096)
    address = first.packed.data_ptr()
    prefetch_next(first, second)
    assert next_weight(address) is not None
    kept: list[torch.Tensor | None] = []
    if gone == "weight":
        del first
    elif gone == "following":
        del second
    else:
        kept = [second.packed, second.absmax, second.absmax_offset]
        del second
    gc.collect()
    assert next_weight(address) is None
    assert all(tensor is not None for tensor in kept)


def test_views_of_a_weight_keep_what_comes_after_it() -> None:
    first, second = random_weight(16, 64), random_weight(16, 64)
    view = Weight(first.packed.reshape(-1, 1), first.shape, first.absmax, 64)
    prefetch_next(view, second)
    del view
    assert next_weight(first.packed.data_ptr()) is not None


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("blocksize", [64, 256])
@pytest.mark.parametrize(("n", "k"), [(512, 4096), (250, 8192), (4096, 320), (33, 25600), (2560, 192)])
@pytest.mark.parametrize("budget", [1 << 12, 1 << 18, 1 << 30])
def test_what_is_prefetched_lies_inside_the_weight(
    n: int, k: int, blocksize: int, nested: bool, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As csrc/cuda/prefetch.cuh goes about it: every run's beginning, of codes and scales alike."""
    monkeypatch.setattr(launches, "_properties", lambda _: (90, 132))
    monkeypatch.setattr(launches, "PREFETCH_BYTES", budget)
    first, second = random_weight(64, 64), random_weight(n, k, nested, blocksize)
    prefetch_next(first, second)
    choice = plan(1, n, k, 90, 132, blocksize, nested)
    assert isinstance(choice, Rows)
    told = launches._next(torch.device("cuda", 0), 1, first.packed.data_ptr())
    assert told.codes == second.packed.data_ptr()
    scales = second.absmax if second.absmax_8bit is None else second.absmax_8bit
    assert told.scales == scales.data_ptr()
    assert (told.absmax_bytes, told.offset_bytes) == ((second.absmax.nbytes,) * 2 if nested else (0, 0))
    assert told.runs * choice.cluster == choice.grid
    groups = told.runs * told.run_groups + told.longer_runs
    assert groups == -(-n // HALF_ROWS)
    assert told.runs * told.code_bytes <= budget
    for run in range(told.runs):
        group = run * told.run_groups + min(run, told.longer_runs)
        row = group * HALF_ROWS
        assert group * told.group_code_bytes == row * k // 2
        assert row * k // 2 + told.code_bytes <= second.packed.nbytes
        scale = group * told.group_scale_bytes
        assert abs(scale - row * k // blocksize * scales.element_size()) < 16
        assert (scale & ~15) + told.scale_bytes <= scales.nbytes


@pytest.mark.parametrize(("m", "n"), [(1, 512), (8, 4112), (1, 2576), (12, 512), (1, 520)])
def test_a_run_of_gates_begins_in_both_halves_of_the_weight(m: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """linear_rows prefetches what it has gated, and gates for so many tokens: each run's first gates and its first ups."""
    monkeypatch.setattr(launches, "_properties", lambda _: (90, 132))
    first, second = random_weight(64, 64), random_weight(n, 4096)
    monkeypatch.setattr(launches, "_gated_weights", {second.packed.data_ptr()})
    prefetch_next(first, second)
    told = launches._next(torch.device("cuda", 0), m, first.packed.data_ptr())
    gates = m <= 8 and n % 16 == 0
    assert (told.parts, told.part_groups) == ((2, n // 16) if gates else (1, 0))
    assert told.runs * told.parts * told.code_bytes <= launches.PREFETCH_BYTES
    begins = set()
    for part in range(told.parts):
        for run in range(told.runs):
            group = part * told.part_groups + run * told.run_groups + min(run, told.longer_runs)
            assert (group * told.group_code_bytes) + told.code_bytes <= second.packed.nbytes
            begins.add(group * HALF_ROWS)
    if gates:
        # A run's units are 16 rows: 8 gates and their ups.
        units = [run * (n // 16 // told.runs) + min(run, n // 16 % told.runs) for run in range(told.runs)]
        assert begins == {part * n // 2 + unit * 8 for part in (0, 1) for unit in units}


def test_a_weight_that_another_kernel_multiplies_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_properties", lambda _: (90, 132))
    first, second = random_weight(64, 64), random_weight(512, 4096)
    device = torch.device("cuda", 0)
    assert launches._next(device, 1, first.packed.data_ptr()).codes is None
    prefetch_next(first, second)
    assert launches._next(device, 1, first.packed.data_ptr()).codes == second.packed.data_ptr()
    assert launches._next(device, 512, first.packed.data_ptr()).codes is None


@gpu
@pytest.mark.parametrize("m", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("nested", [False, True])
def test_the_same_bits_with_and_without(m: int, nested: bool) -> None:
    shapes = [(6144, 4096), (4096, 6144), (8192, 4096), (4096, 8192), (4096, 4096)]
    weights = [random_weight(n, k, nested, device="cuda") for n, k in shapes]
    x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        y = x
        for w in weights * 2:
            y = torch.nn.functional.rms_norm(cuda.linear(y, w), (w.shape[0],))
        return y

    expected = chain()
    results = []
    for linked in (False, True, False):
        for a, b in zip(weights, weights[1:] + weights[:1], strict=True):
            prefetch_next(a, b if linked else None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        for _ in range(50):
            out.fill_(float("nan"))
            graph.replay()
            results.append(torch.equal(out, expected))
    assert all(results)
