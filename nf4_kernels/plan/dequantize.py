"""Dequantize slices of a weight into a buffer, and multiply by each with cuBLAS: for many tokens and for any shape."""

from __future__ import annotations

from dataclasses import dataclass

# Rows of a weight up to which it is one slice.
_WHOLE_ROWS = 12288

# Microseconds on an H200, fitted to bench/results/kernels-nvidia-h200.json.
_LAUNCHES_US = 12.5
"""Two launches, and the gap between them."""
_WEIGHT_US = 1.1e-6
"""The time for each weight, which is written once and read once."""
_GEMM_US = 1.5e-9
"""The time of cuBLAS for each weight and token."""
_MANY_TOKENS = 512
_MANY_TOKENS_US = 0.6e-9
"""Time added for each weight and token beyond _MANY_TOKENS, where power is short."""
_LARGE_WEIGHT = 30e6
_LARGE_WEIGHT_US = 1.56e-9
"""Time added for each weight beyond _LARGE_WEIGHT and token beyond _MANY_TOKENS: power is short for longer."""


@dataclass(frozen=True)
class Dequantize:
    """Dequantize slices of `rows` weight rows into a buffer, multiply by each with cuBLAS."""

    rows: int

    def __str__(self) -> str:
        return f"dequantize + cuBLAS: slices of {self.rows} rows"


def dequantize_cost(m: int, n: int, k: int) -> float:
    """Microseconds of a GEMM of m tokens on an H200, roughly."""
    many, large = max(0, m - _MANY_TOKENS), max(0.0, n * k - _LARGE_WEIGHT)
    return _LAUNCHES_US + n * k * (_WEIGHT_US + _GEMM_US * m + _MANY_TOKENS_US * many) + large * many * _LARGE_WEIGHT_US


def slice_rows(n: int, multiprocessors: int) -> int:
    """Rows of a slice of a large weight: cuBLAS's tiles of 128 rows x 256 tokens then fill all multiprocessors evenly.

    Slices bound the buffer too. Slices that fit in L2 would lose more to small GEMMs than they save.
    """
    return n if n <= _WHOLE_ROWS else 64 * multiprocessors
