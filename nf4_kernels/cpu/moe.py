"""Experts' GEMMs on the CPU kernels: one call sorts tokens by expert, multiplies, activates and sums up."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nf4_kernels import cpu
from nf4_kernels.format import Weight
from nf4_kernels.params import DTYPES, EXPERT_ACTIVATIONS


def moe_linear(
    x: Tensor, weight: Weight, experts: Tensor, bias: Tensor | None, routing_weights: Tensor | None
) -> Tensor:
    """moe.moe_linear() of arguments that fit together."""
    return _run(x, weight, experts, bias, routing_weights, None)


def moe_gated_linear(x: Tensor, weight: Weight, experts: Tensor, activation: str, bias: Tensor | None) -> Tensor:
    """moe.moe_gated_linear() of arguments that fit together."""
    return _run(x, weight, experts, bias, None, activation)


def _run(
    x: Tensor,
    weight: Weight,
    experts: Tensor,
    bias: Tensor | None,
    routing_weights: Tensor | None,
    activation: str | None,
) -> Tensor:
    dtype = DTYPES.get(x.dtype)
    if dtype is None:
        raise ValueError(f"x must be float32, bfloat16 or float16, got {x.dtype}")
    weight = weight.contiguous()
    count, n, k = weight.shape
    tokens, top_k = experts.shape
    x, experts = x.contiguous(), experts.contiguous()
    bias = None if bias is None else bias.contiguous()
    routing = None if routing_weights is None else routing_weights.contiguous()
    columns = n if activation is None else n // 2
    out = x.new_empty((tokens, columns) if routing is not None else (tokens, top_k, columns))
    struct = cpu.struct_of(weight, n, k)
    if tokens and cpu.usable().nf4_cpu_moe(
        ctypes.byref(struct),
        None if bias is None else bias.data_ptr(),
        x.data_ptr(),
        experts.data_ptr(),
        None if routing is None else routing.data_ptr(),
        out.data_ptr(),
        count,
        tokens,
        top_k,
        x.dim() == 3,
        dtype,
        0 if activation is None else EXPERT_ACTIVATIONS[activation],
        torch.get_num_threads(),
    ):
        raise cpu.KernelError(f"nf4_cpu_moe refused {tokens} tokens, {count} experts of N={n}, K={k}")
    return out
