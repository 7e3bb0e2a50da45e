"""Experts' GEMMs in torch's operations around the dequantization of a device, without waiting for the host.

It is for devices without kernels of their own for experts. For few choices, the chosen experts' codes are gathered and
expanded. For many, all experts are expanded, and tokens sorted by expert go through torch's grouped GEMM.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from nf4_kernels import reference
from nf4_kernels.format import Weight
from nf4_kernels.ops import backend

GATHERED = 16
"""Choices whose weights are expanded at a time."""


def moe_linear(
    x: Tensor, weight: Weight, experts: Tensor, bias: Tensor | None, routing_weights: Tensor | None
) -> Tensor:
    """moe.moe_linear() of arguments that fit together; what a captured graph does depends on shapes only."""
    count, n, k = weight.shape
    choices = experts.numel()
    rows = (x.unsqueeze(1).expand(-1, experts.shape[1], -1) if x.dim() == 2 else x).reshape(choices, k)
    ids = experts.reshape(-1).long()
    here = (ids >= 0) & (ids < count)
    clamped = ids.clamp(0, count - 1)
    if choices <= count:
        parts = zip(rows.split(GATHERED), clamped.split(GATHERED), strict=True)
        out = torch.cat([_gathered(part, weight, own) for part, own in parts]) if choices else x.new_empty(0, n)
    elif x.dtype == torch.bfloat16:
        out = _grouped(rows, weight, torch.where(here, ids, count))
    else:
        out = _one_after_another(rows, weight, ids)
    if bias is not None:
        out = out + bias[clamped]
    # Rows of choices whose expert is elsewhere may hold anything, NaN included.
    out = out.masked_fill(~here.unsqueeze(1), 0).view(*experts.shape, n)
    return out if routing_weights is None else reference.weighted_sum(out, routing_weights)


def moe_gated_linear(x: Tensor, weight: Weight, experts: Tensor, activation: str, bias: Tensor | None) -> Tensor:
    """moe.moe_gated_linear() of arguments that fit together."""
    return reference.gated(moe_linear(x, weight, experts, bias, None), activation)


def _expanded(weight: Weight, dtype: torch.dtype) -> Tensor:
    out: Tensor = backend(weight.packed.device.type).dequantize(weight, dtype)
    return out


def _gathered(rows: Tensor, weight: Weight, ids: Tensor) -> Tensor:
    """rows [choices, K] times the weights of their experts, [choices, N]."""
    count, n, k = weight.shape

    def of(tensor: Tensor) -> Tensor:
        return tensor.view(count, -1)[ids].reshape(-1)

    codes, _, offset = weight.nested
    chosen = replace(
        weight,
        packed=of(weight.packed),
        shape=(len(ids), n, k),
        absmax=of(weight.absmax),
        absmax_8bit=None if codes is None else of(codes),
        absmax_offset=offset if offset is None or offset.numel() == 1 else of(offset),
    )
    return torch.bmm(_expanded(chosen, rows.dtype), rows.unsqueeze(2)).squeeze(2)


def _grouped(rows: Tensor, weight: Weight, ids: Tensor) -> Tensor:
    """rows [choices, K], ids up to the number of experts, which is none of them: [choices, N]."""
    count = weight.shape[0]
    sorted_ids, order = torch.sort(ids)
    ends = torch.searchsorted(sorted_ids, torch.arange(count, device=ids.device), right=True).to(torch.int32)
    out = functional.grouped_mm(rows[order], _expanded(weight, rows.dtype).transpose(1, 2), offs=ends)
    return torch.empty_like(out).index_copy_(0, order, out)


def _one_after_another(rows: Tensor, weight: Weight, ids: Tensor) -> Tensor:
    """Multiply all rows by every expert. It is slow, and serves dtypes that torch's grouped GEMM does not take."""
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    for index in range(weight.shape[0]):
        own = functional.linear(rows, _expanded(weight.expert(index), rows.dtype))
        out = torch.where((ids == index).unsqueeze(1), own, out)
    return out
