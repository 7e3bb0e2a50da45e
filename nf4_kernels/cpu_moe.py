"""Experts' GEMMs on the CPU kernels: tokens sorted by expert, one GEMM for each chosen expert."""

from __future__ import annotations

import torch
from torch import Tensor

from nf4_kernels import cpu, reference
from nf4_kernels.format import Weight


def moe_linear(
    x: Tensor, weight: Weight, experts: Tensor, bias: Tensor | None, routing_weights: Tensor | None
) -> Tensor:
    """reference.moe_linear()."""
    count, n, k = weight.shape
    top_k = experts.shape[1]
    ids = experts.reshape(-1)
    order = ids.argsort()
    rows = x[order // top_k] if x.dim() == 2 else x.reshape(-1, k)[order]
    bounds = torch.searchsorted(ids[order], torch.arange(count + 1, dtype=torch.int32)).tolist()
    out = x.new_zeros(ids.numel(), n)
    sorted_out = x.new_zeros(ids.numel(), n)
    for index in range(count):
        begin, end = bounds[index : index + 2]
        if begin < end:
            own = None if bias is None else bias[index]
            sorted_out[begin:end] = cpu.linear(rows[begin:end], weight.expert(index), own)
    out[order] = sorted_out
    out = out.view(*experts.shape, n)
    return out if routing_weights is None else reference.weighted_sum(out, routing_weights)


def moe_gated_linear(x: Tensor, weight: Weight, experts: Tensor, activation: str, bias: Tensor | None) -> Tensor:
    """reference.moe_gated_linear()."""
    return reference.gated(moe_linear(x, weight, experts, bias, None), activation)
