"""8-bit copies of weights on the CPU, which say what cannot be the largest result of a GEMM (csrc/cpu/screening.h)."""

from __future__ import annotations

import torch
from torch import Tensor

from nf4_kernels.cpu.huge_pages import zero_bytes

_MOST_CODE = 127
_UP = 1.0001
"""Norms are made larger by more than they are rounded."""
_CHUNK_ROWS = 4096


class Screening:
    """A weight [N, K] in 8 bits, a scale for each row, and how far that is from the weight."""

    def __init__(self, weight: Tensor) -> None:
        """weight: bfloat16 [N, K]. ValueError where one of its numbers is not finite."""
        n, k = weight.shape
        self._codes = zero_bytes(n * k).view(torch.int8).view(n, k)
        self._scales, self._norms, self._errors = (torch.empty(n) for _ in range(3))
        for first in range(0, n, _CHUNK_ROWS):
            self._fill(slice(first, min(n, first + _CHUNK_ROWS)), weight[first : first + _CHUNK_ROWS].float())
        most_norm = float((self._norms + self._errors).max())
        tensors = (self._codes, self._scales, self._norms, self._errors)
        self.arguments = (*(tensor.data_ptr() for tensor in tensors), most_norm)
        """What nf4_cpu_largest_compact takes of it."""

    def _fill(self, rows: slice, weight: Tensor) -> None:
        """Some rows, whose weight is given in float32."""
        largest = weight.abs().amax(1)
        if not torch.isfinite(largest).all():
            raise ValueError("a number of the weight is not finite")
        # A row of zeros has a scale, too, because numbers are divided by it.
        scales = (largest / _MOST_CODE).clamp_min(2.0**-120)
        codes = (weight / scales[:, None]).round_().clamp_(-_MOST_CODE, _MOST_CODE)
        near = codes * scales[:, None]
        # Sums of k products in float32 are off by less than k / 2^24 of both norms; exceptions are added one by one.
        rounding = 2 * weight.shape[1] * 2.0**-24
        # In float64, since squares of a row's numbers may be too small for float32, and the norm would be 0.
        norms, rests = (
            torch.linalg.vector_norm(each, dim=1, dtype=torch.float64) * _UP for each in (near, weight - near)
        )
        self._codes[rows], self._scales[rows], self._norms[rows] = codes.to(torch.int8), scales, norms
        self._errors[rows] = (rests + rounding * (norms + rests)).float()
