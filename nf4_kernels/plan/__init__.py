"""Choice of the kernel that computes a GEMM, as a pure function: (m, n, k, arch) -> a choice that prints itself.

    >>> print(plan(8, 25600, 5120, 90, 132))
    rows: 8 warps x 10 blocks, 8 tokens, 3 stages, k in 1 part of 80 blocks, grid 132

Each kernel has a module: its launches, and what they cost in microseconds, fitted to measurements on an H200;
bench/results/ holds what each choice reaches.
"""

from __future__ import annotations

from collections.abc import Iterator

from nf4_kernels.plan.dequantize import Dequantize, dequantize_cost, slice_rows
from nf4_kernels.plan.limits import COUNTERS, NORM_K, WORKSPACE_BYTES
from nf4_kernels.plan.mma import MMA_COSTS, MMA_TOKENS, WHOLE_INSTANCES, Mma, mma_candidates, mma_cost
from nf4_kernels.plan.mma_wide import WIDE_COSTS, WIDE_TOKENS, wide_candidates, wide_cost
from nf4_kernels.plan.posed import posed_dequantize_cost
from nf4_kernels.plan.rows import (
    INSTANCES,
    MAX_ROWS_TOKENS,
    Rows,
    rows_candidates,
    rows_cost,
    rows_stages,
    shared_bytes,
)
from nf4_kernels.plan.wgmma import WGMMA_INSTANCES, WGMMA_TOKENS, Wgmma, wgmma_candidates, wgmma_cost

__all__ = (
    "COUNTERS",
    "INSTANCES",
    "MAX_ROWS_TOKENS",
    "MMA_COSTS",
    "MMA_TOKENS",
    "NORM_K",
    "WGMMA_INSTANCES",
    "WGMMA_TOKENS",
    "WHOLE_INSTANCES",
    "WIDE_COSTS",
    "WIDE_TOKENS",
    "WORKSPACE_BYTES",
    "Dequantize",
    "Mma",
    "Plan",
    "Rows",
    "Wgmma",
    "candidates",
    "mma_candidates",
    "plan",
    "rows_candidates",
    "rows_stages",
    "shared_bytes",
    "wide_candidates",
)

Plan = Rows | Wgmma | Mma | Dequantize
# Microseconds that 4 bits of a weight take to come from an H200's memory.
_WEIGHT_US = 0.5 / 4.2e6


def candidates(
    m: int,
    n: int,
    k: int,
    arch: int,
    multiprocessors: int,
    blocksize: int = 64,
    nested: bool = True,
    normalised: bool = False,
) -> Iterator[tuple[Plan, float]]:
    """Every choice for x [m, k] times a weight [n, k] in 16-bit types, with its fitted microseconds; the last always works.

    arch is 10 * major + minor compute capability. normalised: x is normalised in the launch, which linear_rows does in the
    first pass only. Without wgmma the costs are of an H100 and an H200 that ran code for sm_86 and sm_80 (mma.py, posed.py):
    that on an actual GPU, Blackwell's too, all of them are as many times slower is an estimate.
    """
    hopper = arch == 90
    if k % 64 == 0 and blocksize >= 64 and arch >= 80 and m >= 1:
        if m <= MAX_ROWS_TOKENS:
            for rows in rows_candidates(n, k, arch, multiprocessors, nested):
                if not (normalised and rows.passes > 1):
                    yield rows, max(n * k * _WEIGHT_US, rows_cost(rows, m, n))
        if hopper and m in WGMMA_TOKENS:
            for wgmma in wgmma_candidates(m, n, k, multiprocessors):
                yield wgmma, wgmma_cost(wgmma, m, n, k, multiprocessors)
        if not hopper and m in MMA_TOKENS:
            for mma in mma_candidates(m, n, k, multiprocessors):
                yield mma, mma_cost(mma, m, n, k)
        if not hopper and m in WIDE_TOKENS:
            for mma in wide_candidates(m, n, k, multiprocessors):
                yield mma, wide_cost(mma, m, n, k, multiprocessors)
    dequantized = dequantize_cost(m, n, k) if hopper else posed_dequantize_cost(m, n, k, multiprocessors)
    yield Dequantize(slice_rows(n, multiprocessors)), dequantized


def plan(
    m: int,
    n: int,
    k: int,
    arch: int,
    multiprocessors: int,
    blocksize: int = 64,
    nested: bool = True,
    normalised: bool = False,
) -> Plan:
    """The candidate with the least fitted cost; arguments as candidates() has them."""
    found = candidates(m, n, k, arch, multiprocessors, blocksize, nested, normalised)
    return min(found, key=lambda candidate: candidate[1])[0]
