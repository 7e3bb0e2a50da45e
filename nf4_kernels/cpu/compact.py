"""Weights in compact bfloat16 on the CPU: 12 bits each, and every number as it was (csrc/cpu/compact.h)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nf4_kernels import cpu
from nf4_kernels.cpu.huge_pages import zero_bytes

_COLUMNS, _GROUP_BYTES = 32, 48
_MOST_EXCEPTIONS = 1 / 100
"""Of all numbers: each costs 6 bytes, and a multiplication of its own."""


class CompactBf16:
    """A bfloat16 weight [N, K] whose high bytes are codes of 4 bits; the few that have no code stand in a list."""

    def __init__(self, weight: Tensor) -> None:
        """weight: bfloat16 [N, K]. ValueError where K is not a multiple of 32, or too many numbers would be exceptions."""
        self.n, self.k = weight.shape
        if weight.dtype is not torch.bfloat16 or not weight.is_cpu or self.k % _COLUMNS:
            raise ValueError(f"weight must be bfloat16 on the CPU with K a multiple of 32, got {self.k} {weight.dtype}")
        weight = weight.contiguous()
        most = int(weight.numel() * _MOST_EXCEPTIONS)
        groups = (self.n, self.k // _COLUMNS, _GROUP_BYTES)
        self.groups = zero_bytes(math.prod(groups)).view(groups)
        self.high_bytes = torch.empty(16, dtype=torch.uint8)
        self.first = torch.empty(self.n + 1, dtype=torch.int32)
        self.columns = torch.empty(most, dtype=torch.int32)
        self.values = torch.empty(most, dtype=torch.bfloat16)
        tensors = (self.groups, self.high_bytes, self.first, self.columns, self.values)
        count = cpu.usable().nf4_cpu_compact_bf16(
            weight.data_ptr(), self.n, self.k, *(tensor.data_ptr() for tensor in tensors), most
        )
        if count < 0:
            raise ValueError(
                f"more than {most} of {weight.numel()} numbers have none of the 16 most frequent high bytes"
            )
        self.columns, self.values = self.columns[:count].clone(), self.values[:count].clone()
        exceptions = (self.first, self.columns, self.values) if count else ()
        pointers = [tensor.data_ptr() for tensor in (self.groups, self.high_bytes, *exceptions)]
        self._pointers = pointers if count else [*pointers, None, None, None]
        self._run = cpu.usable().nf4_cpu_linear_compact

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """float32 x [..., K] times the transposed weight plus bias [N]: [..., N] in float32, accumulated in float32."""
        if x.dtype is not torch.float32 or x.shape[-1] != self.k or not x.is_cpu:
            raise ValueError(f"x must be float32 on the CPU and end in {self.k}, got {list(x.shape)} {x.dtype}")
        if bias is not None and (bias.dtype is not torch.float32 or bias.numel() != self.n or not bias.is_contiguous()):
            raise ValueError(f"bias must be contiguous float32 with {self.n} elements, got {bias.numel()} {bias.dtype}")
        x = x.contiguous()
        out = x.new_empty((*x.shape[:-1], self.n))
        bias_pointer, m = None if bias is None else bias.data_ptr(), x.numel() // self.k
        arguments = (x.data_ptr(), *self._pointers, bias_pointer, out.data_ptr())
        if m and self._run(*arguments, m, self.n, self.k, torch.get_num_threads()):
            raise cpu.KernelError(f"compact bfloat16: the library refused M={m}, N={self.n}, K={self.k}")
        return out

    def expanded(self) -> Tensor:
        """The weight again, bfloat16 [N, K]."""
        packed = self.groups.view(self.n, -1, 3, 16)
        codes = torch.stack((packed[:, :, 2] & 15, packed[:, :, 2] >> 4), 2)
        words = self.high_bytes[codes.int()].int() << 8 | packed[:, :, :2].int()
        # Places are columns but for the two middle quarters, which are exchanged.
        ordered = words.view(self.n, -1, 4, 8)[:, :, [0, 2, 1, 3]].reshape(self.n, self.k)
        out = ordered.to(torch.int16).view(torch.bfloat16)
        rows = torch.repeat_interleave(torch.arange(self.n), (self.first[1:] - self.first[:-1]).long())
        out[rows, self.columns.long()] = self.values
        return out
