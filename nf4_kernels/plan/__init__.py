"""Which kernel computes a GEMM, as a pure function: (m, n, k, arch) -> a choice that prints itself.

    >>> print(plan(8, 25600, 5120, 90, 132))
    rows: 8 warps x 10 blocks, 8 tokens, 3 stages, k in 1 part of 80 blocks, grid 132

Each kernel has a module: its launches, and what they cost in microseconds, fitted to measurements on an H200;
bench/results/ holds what each choice reaches.
"""

from __future__ import annotations

import math

from nf4_kernels.plan.dequantize import Dequantize, dequantize_cost, slice_rows
from nf4_kernels.plan.limits import COUNTERS, NORM_K, PREFETCH_BYTES, WORKSPACE_BYTES
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
    "NORM_K",
    "PREFETCH_BYTES",
    "SMALL_INSTANCES",
    "WGMMA_INSTANCES",
    "WGMMA_TOKENS",
    "WORKSPACE_BYTES",
    "Dequantize",
    "Plan",
    "Rows",
    "Wgmma",
    "plan",
    "rows_candidates",
    "rows_stages",
    "shared_bytes",
)

Plan = Rows | Wgmma | Dequantize

# How many times slower than on an H200 a launch is, estimated from data sheets (A100; RTX 3090, 4090; RTX 5090), not
# measured. The numbers lie between the ratios of memory (a weight read once for a few tokens) and of tensor cores (a
# dequantized one).
_SLOWER = {80: 2.5, 86: 5.0, 89: 5.0, 120: 3.0}
# More tokens than one launch of linear_rows takes are several launches up to here, where there is no linear_wgmma.
_MANY_TOKENS = 256
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
    slower = _SLOWER.get(arch, 1.0)
    cost = dequantize_cost(m, n, k) * slower
    if k % 64 or blocksize < 64 or arch < 80:
        return choice
    if 1 <= m <= (MAX_ROWS_TOKENS if arch == 90 else _MANY_TOKENS):
        tiles = 1 if m <= 8 else 2 if m <= 16 else 4
        launches, least = math.ceil(m / (tiles * 8)), n * k * _WEIGHT_US * slower
        for rows in rows_candidates(n, k, tiles, arch, multiprocessors, nested):
            if normalised and rows.passes > 1:
                continue
            several = launches * max(least, rows_cost(rows, min(m, tiles * 8), n))
            if several < cost or (m <= MAX_ROWS_TOKENS and isinstance(choice, Dequantize)):
                choice, cost = rows, several
    if arch == 90 and m in WGMMA_TOKENS:
        for wgmma in wgmma_candidates(m, n, k, multiprocessors):
            one = wgmma_cost(wgmma, m, n, k, multiprocessors)
            if one < cost:
                choice, cost = wgmma, one
    return choice
