"""Linear layers on the CPU kernels with as little overhead per call as possible."""

from __future__ import annotations

import torch
from torch import nn

from nf4_kernels import cpu, ops
from nf4_kernels.cpu.huge_pages import HugePages
from server.engine.runtime.model.projections import NF4Linear


class CpuNF4Linear(nn.Module):
    """One NF4 or FP4 GEMM whose arguments have been laid out for the kernel once."""

    def __init__(self, layer: NF4Linear, pages: HugePages) -> None:
        """pages: where the layer's codes and scales are put."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        if layer.absmax_8bit is None:
            layer.absmax = pages.copy(layer.absmax)
        else:
            layer.absmax_8bit = pages.copy(layer.absmax_8bit)
        layer.packed = pages.copy(layer.packed)
        self.weight, self.own_bias = layer.weight, layer.bias
        self.prepared = cpu.PreparedLinear(self.weight, self.own_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] to [..., out_features]."""
        return self.prepared(x)


class Bf16Linear(nn.Module):
    """A float32 GEMM with a weight that bfloat16 holds without loss: half the memory traffic, the same result."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", HugePages().copy(weight.to(torch.bfloat16)), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] to [..., N], float32."""
        return ops.linear_bf16w(x, self.weight, self.bias)


def use_cpu_kernels(model: nn.Module) -> None:
    """Put the model's NF4Linear layers and its output layer on the CPU kernels, where these can be used."""
    if cpu.load_error() is not None:
        return
    pages = HugePages()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, NF4Linear):
                setattr(parent, name, CpuNF4Linear(child, pages))
            elif name == "lm_head" and isinstance(child, nn.Linear) and _is_bfloat16(child.weight):
                setattr(parent, name, Bf16Linear(child.weight.data, child.bias))


def _is_bfloat16(weight: torch.Tensor) -> bool:
    return weight.dtype is torch.float32 and bool(torch.equal(weight.to(torch.bfloat16).float(), weight))
