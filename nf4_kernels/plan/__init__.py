"""Which kernel computes a GEMM, as a pure function: (m, n, k, arch) -> a choice that prints itself.

    >>> print(plan(8, 25600, 5120, 90, 132))
    rows: 8 warps x 10 blocks, 8 tokens, 3 stages, k in 1 part of 80 blocks, grid 132

Each kernel has a module: its launches, and what they cost in microseconds, fitted to measurements on an H200;
bench/results/ holds what each choice reaches.
"""

from __future__ import annotations

from collections.abc import Iterator

from nf4_kernels.plan.dequantize import Dequantize, dequantize_cost, slice_rows
from nf4_kernels.plan.limits import COUNTERS, NORM_K, PREFETCH_BYTES, WORKSPACE_BYTES
from nf4_kernels.plan.mma import MMA_COSTS, MMA_TOKENS, Mma, mma_candidates, mma_cost
from nf4_kernels.plan.posed import posed_dequantize_cost, posed_rows_cost
from nf4_kernels.plan.rows import (
    GROUP_ROWS,
    HALF_ROWS,
    INSTANCES,
    MAX_ROWS_TOKENS,
    SMALL_INSTANCES,
    Rows,
    rows_candidates,
    rows_cost,
    rows_stages,
    shared_bytes,
)
from nf4_kernels.plan.wgmma import WGMMA_INSTANCES, WGMMA_TOKENS, Wgmma, wgmma_candidates, wgmma_cost

__all__ = (
    "COUNTERS",
    "GROUP_ROWS",
    "HALF_ROWS",
    "INSTANCES",
    "MAX_ROWS_TOKENS",
    "MMA_COSTS",
    "MMA_TOKENS",
    "NORM_K",
    "PREFETCH_BYTES",
    "SMALL_INSTANCES",
    "WGMMA_INSTANCES",
    "WGMMA_TOKENS",
    "WORKSPACE_BYTES",
    "Dequantize",
    "Mma",
    "Plan",
    "Rows",
    "Wgmma",
    "mma_candidates",
    "plan",
    "rows_candidates",
    "rows_stages",
    "shared_bytes",
)

Plan = Rows | Wgmma | Mma | Dequantize
# Microseconds that 4 bits of a weight take to come from an H200's memory.
_WEIGHT_US = 0.5 / 4.2e6


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
    """The choice for x [m, k] times a weight [n, k] in 16-bit types; arch is 10 * major + minor compute capability.

    normalised: x is normalised in the launch, which linear_rows does in the first pass only.
    """
    choice: Plan = Dequantize(slice_rows(n, multiprocessors))
    if k % 64 or blocksize < 64 or arch < 80 or m < 1:
        return choice
    if arch != 90:
        return _without_wgmma(m, n, k, arch, multiprocessors, nested, normalised, choice)
    cost = dequantize_cost(m, n, k)
    if m <= MAX_ROWS_TOKENS:
        for rows in _rows(m, n, k, arch, multiprocessors, nested, normalised):
            one = max(n * k * _WEIGHT_US, rows_cost(rows, m, n))
            if one < cost or isinstance(choice, Dequantize):
                choice, cost = rows, one
    if m in WGMMA_TOKENS:
        for wgmma in wgmma_candidates(m, n, k, multiprocessors):
            one = wgmma_cost(wgmma, m, n, k, multiprocessors)
            if one < cost:
                choice, cost = wgmma, one
    return choice


def _rows(m: int, n: int, k: int, arch: int, multiprocessors: int, nested: bool, normalised: bool) -> Iterator[Rows]:
    tiles = 1 if m <= 8 else 2 if m <= 16 else 4
    for rows in rows_candidates(n, k, tiles, arch, multiprocessors, nested):
        if not (normalised and rows.passes > 1):
            yield rows


def _without_wgmma(
    m: int, n: int, k: int, arch: int, multiprocessors: int, nested: bool, normalised: bool, choice: Plan
) -> Plan:
    """The cheapest by times of one H100 that ran code for sm_86 and sm_80 (mma.py, posed.py).

    That on an actual GPU all of them are as many times slower is an estimate. Where tensor cores are slower beside the
    memory than an H100's, cuBLAS loses more: linear_mma may then be the faster one for more tokens than are planned. It
    differs from sm_90 on (csrc/cuda/mma_sm80/loads.cuh), and what it is there has not run: it is not planned.
    """
    cost = posed_dequantize_cost(m, n, k)
    if m <= MAX_ROWS_TOKENS:
        for rows in _rows(m, n, k, arch, multiprocessors, nested, normalised):
            one = posed_rows_cost(rows, m, n, arch)
            if one < cost:
                choice, cost = rows, one
    if arch < 90 and m in MMA_TOKENS:
        for mma in mma_candidates(m, n, k, multiprocessors):
            one = mma_cost(mma, m, n, k)
            if one < cost:
                choice, cost = mma, one
    return choice
