"""The cost of dequantization and cuBLAS without wgmma: microseconds on an H200 that ran code for sm_86 and sm_80.

Fitted to bench/results/posed-80-nvidia-h200.json and posed-86-nvidia-h200.json. Nothing has been measured on a GPU of those
capabilities: that all launches are as many times slower there is an estimate.
"""

from __future__ import annotations

_LAUNCHES_US = 8.4
_WEIGHT_US = 0.84e-6
"""Dequantization and cuBLAS, for each weight."""
_CACHED_WEIGHT = 17e6
_LARGE_WEIGHT_US = 0.35e-6
"""Time added for each weight beyond _CACHED_WEIGHT, whose 16-bit values do not stay in L2."""
_TOKEN_US = 1.05e-9
"""Time added for each weight and token."""
_MULTIPROCESSORS = 132
"""Of an H200. With fewer it takes as many times longer, as linear_mma does; with more not less, as memory bounds it."""


def posed_dequantize_cost(m: int, n: int, k: int, multiprocessors: int) -> float:
    """Microseconds of dequantization and cuBLAS of m tokens."""
    large = max(0.0, n * k - _CACHED_WEIGHT)
    computed = n * k * (_WEIGHT_US + _TOKEN_US * m) + large * _LARGE_WEIGHT_US
    return _LAUNCHES_US + computed * max(1.0, _MULTIPROCESSORS / multiprocessors)
