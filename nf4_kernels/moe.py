"""GEMMs of mixtures of experts, moe_linear() and moe_gated_linear(), for CPU and CUDA.

A weight is [experts, N, K] in one piece; every token brings its experts' ids. Shapes do not depend on which experts were
chosen, and nothing on a device waits for the host, so that steps can be captured. Argument conventions:
docs/architecture.md.

follows_gated says that the latest moe_gated_linear on the stream was of the same experts, and that these and the weight have
not been written since. Then a CUDA kernel reads them while launches in front still run. Where that is not so, results are
undefined.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from nf4_kernels import cpu, moe_torch, reference
from nf4_kernels.cpu import moe as cpu_moe
from nf4_kernels.cuda import moe as cuda_moe
from nf4_kernels.format import Weight, check_experts
from nf4_kernels.ops import backend


def _library_of(device_type: str) -> ModuleType:
    """The backend where cuda.moe does not compute: cpu.moe, or else moe_torch with the device's own dequantization."""
    return cpu_moe if device_type == "cpu" and backend("cpu") is cpu else moe_torch


def _check(x: Tensor, weight: Weight, experts: Tensor, bias: Tensor | None, routing: Tensor | None = None) -> None:
    """ValueError, by name, for what does not fit together."""
    count, n, k = check_experts(weight)
    if experts.dim() != 2:
        raise ValueError(f"experts must be int32 [tokens, top_k], got {experts.dtype} {list(experts.shape)}")
    if list(x.shape[:-1]) not in ([experts.shape[0]], list(experts.shape)) or x.shape[-1] != k:
        raise ValueError(
            f"x must be [tokens, {k}] or [tokens, top_k, {k}], got {list(x.shape)} for {list(experts.shape)}"
        )
    for name, tensor, dtype, shape in (
        ("experts", experts, torch.int32, experts.shape),
        ("bias", bias, x.dtype, (count, n)),
        ("routing_weights", routing, torch.float32, experts.shape),
    ):
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype or tensor.device != x.device):
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name} must be {dtype} {list(shape)} on {x.device}, got {found}")


def moe_linear(
    x: Tensor,
    weight: Weight,
    experts: Tensor,
    bias: Tensor | None = None,
    routing_weights: Tensor | None = None,
    follows_gated: bool = False,
) -> Tensor:
    """x [tokens, K] or [tokens, top_k, K] times the weights of each token's experts, of [E, N, K].

    experts int32 [tokens, top_k]; an id outside of 0 ... E - 1 gives zeros. bias [E, N]. The result is [tokens, top_k,
    N] in x's dtype. With routing_weights (float32 [tokens, top_k]) these rounded results are multiplied by their
    weights and summed over top_k in float32, rounded once: [tokens, N]. ValueError names what does not fit.
    """
    _check(x, weight, experts, bias, routing_weights)
    if cuda_moe.takes(x, weight.shape, weight.blocksize, experts.shape[1], gated=False):
        out: Tensor = cuda_moe.run(x, weight, experts, bias, routing_weights, None, follows_gated=follows_gated)
    else:
        out = _library_of(x.device.type).moe_linear(x, weight, experts, bias, routing_weights)
    return out


def moe_gated_linear(x: Tensor, weight: Weight, experts: Tensor, activation: str, bias: Tensor | None = None) -> Tensor:
    """reference.gated() of moe_linear() with a weight [E, 2 F, K] of F gates, then F ups: [tokens, top_k, F].

    An id outside of 0 ... E - 1 gives zeros. ValueError names what does not fit.
    """
    _check(x, weight, experts, bias)
    reference.check_expert_gate(weight.shape[1], activation)
    if cuda_moe.takes(x, weight.shape, weight.blocksize, experts.shape[1], gated=True):
        out: Tensor = cuda_moe.run(x, weight, experts, bias, None, activation)
    else:
        out = _library_of(x.device.type).moe_gated_linear(x, weight, experts, activation, bias)
    return out
