"""Costs of kernels other than linear_mma without wgmma: microseconds on an H200 that ran code for sm_86 and sm_80.

Fitted to bench/results/posed-80-nvidia-h200.json and posed-86-nvidia-h200.json; linear_rows in 99 KB to an H100's. Nothing
has been measured on a GPU of those capabilities: that all launches are as many times slower there is an estimate.
"""

from __future__ import annotations

from nf4_kernels.plan.rows import Rows, rows_cost, shared_bytes

_LAUNCHES_US = 8.4
_WEIGHT_US = 0.84e-6
"""Dequantization and cuBLAS, for each weight."""
_CACHED_WEIGHT = 17e6
_LARGE_WEIGHT_US = 0.35e-6
"""Time added for each weight beyond _CACHED_WEIGHT, whose 16-bit values do not stay in L2."""
_TOKEN_US = 1.05e-9
"""Time added for each weight and token."""
# linear_rows, by bytes of shared memory and token tiles: what its time on an H200 is multiplied by, and what is added.
_ROWS = {
    99 << 10: {1: (1.67, -3.5), 2: (1.3, -2.9), 4: (0.68, 0.6)},
    163 << 10: {1: (1.78, -4.1), 2: (1.32, -3.2), 4: (0.86, 1.3)},
}


def posed_dequantize_cost(m: int, n: int, k: int) -> float:
    """Microseconds of dequantization and cuBLAS of m tokens."""
    large = max(0.0, n * k - _CACHED_WEIGHT)
    return _LAUNCHES_US + n * k * (_WEIGHT_US + _TOKEN_US * m) + large * _LARGE_WEIGHT_US


def posed_rows_cost(rows: Rows, m: int, n: int, arch: int) -> float:
    """Microseconds of a launch of linear_rows; on GPUs with more shared memory as on an H200."""
    times, more = _ROWS.get(shared_bytes(arch), {}).get(rows.tiles, (1.0, 0.0))
    return times * rows_cost(rows, m, n) + more
