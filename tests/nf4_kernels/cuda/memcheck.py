"""Calls every launch of the CUDA kernels on small shapes, for compute-sanitizer, which says where one leaves its memory.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.nf4_kernels.cuda.memcheck

Without torch's caching each tensor is an allocation of its own, so that what is read or written beyond its end is seen.
Results are not compared with anything: the tests do that. Sections that are named as arguments run alone.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch

from nf4_kernels import Weight, cuda, reference
from nf4_kernels.cuda import launches
from nf4_kernels.cuda import moe as cuda_moe
from nf4_kernels.cuda.routing import route, route_linear
from nf4_kernels.plan import (
    MMA_COSTS,
    NORM_K,
    WGMMA_INSTANCES,
    WHOLE_INSTANCES,
    WIDE_COSTS,
    Dequantize,
    Mma,
    Plan,
    rows_candidates,
)
from nf4_kernels.plan.moe import moe_candidates
from tests.nf4_kernels.cuda.cuda_weights import DEVICE, random_weight, split
from tests.nf4_kernels.cuda.test_linear_mma import warps_of, whole, wide
from tests.nf4_kernels.cuda.test_moe_cuda import device, random_choices, random_experts
from tests.nf4_kernels.shards import along_k

HALVES = (torch.bfloat16, torch.float16)
MULTIPROCESSORS = 5
"""Work is divided as if there were this many, so that small weights are cut as large ones are."""


def whole_pieces(weight: Weight) -> Weight:
    """The weight with scales in allocations of whole 16 bytes.

    linear_rows copies scales in such pieces, and wide tiles read four at once. A piece with a byte inside an allocation is
    inside it whole, as allocations are a multiple of 256 bytes; but compute-sanitizer goes by the bytes that were asked for.
    """

    def padded(scales: torch.Tensor) -> torch.Tensor:
        size = -(-scales.nbytes // 16) * 16 // scales.itemsize
        room = torch.zeros(size, dtype=scales.dtype, device=scales.device)
        room[: scales.numel()] = scales
        return room[: scales.numel()]

    codes = None if weight.absmax_8bit is None else padded(weight.absmax_8bit)
    return dataclasses.replace(
        weight, absmax_8bit=codes, absmax=padded(weight.absmax) if codes is None else weight.absmax
    )


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normally distributed numbers on the GPU."""
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def with_plan(choice: Plan, *calls: Callable[[], object]) -> int:
    """Call all with one launch instead of the planned one; gives how many there were."""
    with patch.object(launches, "_plan", lambda *_: choice):
        for call in calls:
            call()
    return len(calls)


def fused_calls(weight: Weight, m: int, normalised: bool) -> Iterator[Callable[[], object]]:
    """Calls of a GEMM of m tokens with and without all that it fuses."""
    n, k = weight.matrix
    for dtype in HALVES:
        x, bias, residual = random(m, k, dtype=dtype), random(n, dtype=dtype), random(m, n, dtype=dtype)
        norm = random(k) if normalised and dtype == torch.bfloat16 else None
        yield partial(cuda.linear, x, weight)
        yield partial(cuda.fused_linear, x, weight, bias, residual, norm, 1e-6)


def run_dequantize() -> int:
    """Every block size and type, odd sizes, a part of a nested weight."""
    count = 0
    for blocksize in cuda.BLOCKSIZES:
        for nested in (False, True):
            weight = random_weight(33, 5 * blocksize + 2, blocksize, nested).weight
            for dtype in (torch.float32, *HALVES):
                cuda.dequantize(weight, dtype)
                count += 1
    weight = along_k(random_weight(96, 768).weight, range(256, 768))
    cuda.dequantize(weight, torch.bfloat16)
    return count + 1 + with_plan(Dequantize(40), partial(cuda.linear, random(700, 512), weight))


def run_rows() -> int:
    """Every way to divide linear_rows' work."""
    count, arch = 0, device()[0]
    for n, k in ((200, 4096), (333, 1024), (90, 5376), (80, 1600), (208, 4096)):
        for nested in (False, True):
            weight = whole_pieces(random_weight(n, k, 64, nested).weight)
            for m in (1, 7):
                for choice in rows_candidates(n, k, arch, MULTIPROCESSORS, nested):
                    normalises = choice.passes == 1 and k <= NORM_K
                    count += with_plan(choice, *fused_calls(weight, m, normalises))
                    if normalises and n % 16 == 0:
                        x, bias, norm = random(m, k), random(n), random(k)
                        count += with_plan(choice, partial(cuda.gated_linear, x, weight, bias, norm, 1e-6))
    return count


def run_wgmma() -> int:
    """Every instance of linear_wgmma: stream-K and split-K, on x, on tiles, with a gate."""
    count = 0
    for tokens, groups in WGMMA_INSTANCES:
        for n, k, m, blocks, first_steps in ((208, 448, 2 * tokens + 1, 5, 0), (512, 4160, tokens + 1, 2, 10)):
            choice = split(tokens, groups, m, n, k, blocks, first_steps)
            for nested in (False, True):
                weight = random_weight(n, k, 64, nested).weight
                x, bias, norm = random(m, k), random(n), random(k)
                tiles = reference.tile_activations(x, tokens)
                tile = 64 if n % 512 == 0 else 0
                count += with_plan(
                    choice,
                    *fused_calls(weight, m, True),
                    partial(cuda.tiled_linear, tiles, m, weight, bias, random(m, n)),
                    partial(cuda.gated_linear, x, weight, bias, norm, 1e-6),
                    partial(cuda.gated_linear, x, weight, activation="gelu_tanh", tile=tile),
                )
    return count


def run_mma() -> int:
    """Every instance of linear_mma: whole and split tiles, a thread block's share in two tiles."""
    count = 0
    for warps, tokens in MMA_COSTS:
        for n, k, m, blocks in ((208, 448, 2 * tokens + 1, 5), (512, 1088, tokens, 30), (63, 64, tokens - 1, 1)):
            choice = Mma(tokens, warps, blocks)
            for nested in (False, True):
                weight = random_weight(n, k, 64, nested).weight
                count += with_plan(choice, *fused_calls(weight, m, True))
    return count


def run_whole() -> int:
    """Every instance of linear_mma's whole tiles: warps that share k or none, several tiles of a thread block."""
    count = 0
    for instance in WHOLE_INSTANCES:
        tokens = instance[1]
        for warps in warps_of(instance):
            for n, k, m in ((208, 448, 2 * tokens + 1), (520, 2112, tokens), (63, 64, tokens - 1)):
                choice = whole(instance, warps, m, n, multiprocessors=3)
                for nested in (False, True):
                    weight = random_weight(n, k, 64, nested).weight
                    count += with_plan(choice, *fused_calls(weight, m, True))
    return count


def run_wide() -> int:
    """Every instance of linear_mma's wide tiles, whole and split."""
    count = 0
    for row_tiles, tokens in WIDE_COSTS:
        for n, k, m, parts in ((208, 448, 2 * tokens + 1, 2), (520, 2112, tokens, 1), (63, 64, tokens - 1, 1)):
            for nested in (False, True):
                weight = whole_pieces(random_weight(n, k, 64, nested).weight)
                count += with_plan(wide(row_tiles, tokens, m, n, k, parts), *fused_calls(weight, m, True))
    return count


def run_experts() -> int:
    """Every launch for experts."""
    count = 0
    shapes = ((5, 96, 256, 2), (6, 208, 704, 3), (24, 202, 2048, 4), (30, 128, 768, 8), (3, 96, 4096, 3))
    for experts, n, k, top_k in shapes:
        for nested, gated, tokens in ((True, True, 1), (True, False, 9), (False, True, 33), (False, False, 150)):
            weight = random_experts(experts, n, k, nested=nested)
            arch, processors = device()
            x = random(tokens, top_k, k) if tokens == 9 else random(tokens, k)
            chosen = random_choices(tokens, top_k, experts, "unknown" if tokens == 33 else "distinct")
            routing = None if gated else torch.rand(tokens, top_k, device=DEVICE)
            bias, activation = random(experts, n), "silu" if gated else None
            for choice in moe_candidates(
                tokens, top_k, experts, n, k, arch, processors, nested, gated, routing is not None
            ):
                cuda_moe.run(x, weight, chosen, bias, routing, activation, choice)
                count += 1
    return count


def run_routers() -> int:
    """Routers with and without their GEMM."""
    count = 0
    for width, hidden, k in ((128, 2048, 8), (60, 2048, 4), (8, 4096, 2), (33, 3840, 32)):
        for tokens in (1, 9, 61, 128):
            route(random(tokens, width), k, True, torch.bfloat16)
            count += 1
            # In a cluster of one block, of up to 16 experts, compute-sanitizer takes each store to the cluster's memory for
            # an error, while PTX lets a block be a cluster.
            if width > 16:
                route_linear(random(tokens, hidden), random(width, hidden), k, True, torch.bfloat16)
                count += 1
    return count


def run_clock() -> int:
    """Launches that add up their times, where the clock runs."""
    cuda.start_clock(DEVICE)
    weight = random_weight(1024, 4096).weight
    for m in (1, 8, 30, 100, 200):
        cuda.linear(random(m, 4096), weight)
    cuda.stop_clock(DEVICE)
    return 5


SECTIONS = {
    "dequantize": run_dequantize,
    "rows": run_rows,
    "wgmma": run_wgmma,
    "mma": run_mma,
    "whole": run_whole,
    "wide": run_wide,
    "experts": run_experts,
    "routers": run_routers,
    "clock": run_clock,
}


def main() -> None:
    """Run the sections, and say what each had."""
    for name in sys.argv[1:] or SECTIONS:
        begun = time.perf_counter()
        count = SECTIONS[name]()
        torch.cuda.synchronize()
        print(f"{name}: {count} calls in {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
