"""NF4 weights whose tensors are a module's buffers."""

from __future__ import annotations

import torch
from torch import nn

from nf4_kernels import Weight

_TENSORS = ("packed", "absmax", "absmax_8bit", "absmax_code", "absmax_offset")


class WeightBuffers(nn.Module):
    """A weight and its bias as buffers."""

    packed: torch.Tensor
    absmax: torch.Tensor
    absmax_8bit: torch.Tensor | None
    absmax_code: torch.Tensor | None
    absmax_offset: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, weight: Weight, bias: torch.Tensor | None) -> None:
        super().__init__()
        for name in _TENSORS:
            self.register_buffer(name, getattr(weight, name), persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.shape = [int(size) for size in weight.shape]
        self.blocksize = weight.blocksize
        self.group_offset, self.group_skip, self.table = weight.group_offset, weight.group_skip, weight.table

    @property
    def weight(self) -> Weight:
        """The weight with the tensors that the buffers hold now."""
        return Weight(
            self.packed, tuple(self.shape), self.absmax, self.blocksize, self.absmax_8bit, self.absmax_code,
            self.absmax_offset, self.group_offset, self.group_skip, self.table,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        tensors = (getattr(self, name) for name in _TENSORS)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
