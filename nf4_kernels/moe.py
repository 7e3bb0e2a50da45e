"""The ops of mixtures of experts, nf4::moe_linear and nf4::moe_gated_linear, for CPU and CUDA, with fakes.

A weight is [experts, N, K] in one piece; every token brings its experts' ids. Shapes do not depend on which experts were
chosen, and nothing on a device waits for the host, so that steps can be captured and compiled. Argument conventions:
docs/architecture.md.

follows_gated says that the latest moe_gated_linear on the stream was of the same experts, and that these and the weight have
not been written since. Then a CUDA kernel reads them while launches in front still run. Where that is not so, results are
undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from nf4_kernels import cpu, moe_torch, reference
from nf4_kernels.cpu import moe as cpu_moe
from nf4_kernels.cuda import moe as cuda_moe
from nf4_kernels.format import Weight, check_experts
from nf4_kernels.ops import backend

_WEIGHT = "Tensor packed, SymInt[] shape, Tensor absmax, int blocksize"
_NESTED = "Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None"
_library = torch.library.Library("nf4", "FRAGMENT")
_library.define(
    f"moe_linear(Tensor x, {_WEIGHT}, Tensor experts, Tensor? bias=None, Tensor? routing_weights=None, {_NESTED}, "
    "bool follows_gated=False) -> Tensor"
)
_library.define(
    f"moe_gated_linear(Tensor x, {_WEIGHT}, Tensor experts, str activation, Tensor? bias=None, {_NESTED}) -> Tensor"
)


def _library_of(device_type: str) -> ModuleType:
    """The backend where cuda.moe does not compute: cpu.moe, or else moe_torch with the device's own dequantization."""
    return cpu_moe if device_type == "cpu" and backend("cpu") is cpu else moe_torch


def _check(x: Tensor, weight: Weight, experts: Tensor, bias: Tensor | None) -> None:
    """ValueError, by name, for what does not fit together."""
    count, n, k = check_experts(weight)
    if experts.dim() != 2 or experts.dtype != torch.int32:
        raise ValueError(f"experts must be int32 [tokens, top_k], got {experts.dtype} {list(experts.shape)}")
    if list(x.shape[:-1]) not in ([experts.shape[0]], list(experts.shape)) or x.shape[-1] != k:
        raise ValueError(
            f"x must be [tokens, {k}] or [tokens, top_k, {k}], got {list(x.shape)} for {list(experts.shape)}"
        )
    if bias is not None and (bias.shape != (count, n) or bias.dtype != x.dtype):
        raise ValueError(f"bias must be {x.dtype} {[count, n]}, got {bias.dtype} {list(bias.shape)}")


def _moe_linear(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    experts: Tensor,
    bias: Tensor | None = None,
    routing_weights: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
    follows_gated: bool = False,
) -> Tensor:
    weight = Weight(packed, tuple(shape), absmax, blocksize, absmax_8bit, absmax_code, absmax_offset)
    _check(x, weight, experts, bias)
    if routing_weights is not None and (
        routing_weights.shape != experts.shape or routing_weights.dtype != torch.float32
    ):
        given = f"{routing_weights.dtype} {list(routing_weights.shape)}"
        raise ValueError(f"routing_weights must be float32 {list(experts.shape)}, got {given}")
    if cuda_moe.takes(x, shape, blocksize, experts.shape[1], gated=False):
        out: Tensor = cuda_moe.run(x, weight, experts, bias, routing_weights, None, follows_gated=follows_gated)
    else:
        out = _library_of(x.device.type).moe_linear(x, weight, experts, bias, routing_weights)
    return out


def _moe_gated_linear(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    experts: Tensor,
    activation: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    weight = Weight(packed, tuple(shape), absmax, blocksize, absmax_8bit, absmax_code, absmax_offset)
    _check(x, weight, experts, bias)
    reference.check_expert_gate(shape[1], activation)
    if cuda_moe.takes(x, shape, blocksize, experts.shape[1], gated=True):
        out: Tensor = cuda_moe.run(x, weight, experts, bias, None, activation)
    else:
        out = _library_of(x.device.type).moe_gated_linear(x, weight, experts, activation, bias)
    return out


for _key in ("CPU", "CUDA"):
    _library.impl("moe_linear", _moe_linear, _key)
    _library.impl("moe_gated_linear", _moe_gated_linear, _key)


@torch.library.register_fake("nf4::moe_linear")  # type: ignore[untyped-decorator]
def _(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    experts: Tensor,
    bias: Tensor | None = None,
    routing_weights: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
    follows_gated: bool = False,
) -> Tensor:
    torch._check(x.shape[-1] == shape[2], lambda: f"x ends in {x.shape[-1]}, the weight is {list(shape)}")
    rows = experts.shape if routing_weights is None else experts.shape[:1]
    return x.new_empty((*rows, shape[1]))


@torch.library.register_fake("nf4::moe_gated_linear")  # type: ignore[untyped-decorator]
def _(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    experts: Tensor,
    activation: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    torch._check(x.shape[-1] == shape[2], lambda: f"x ends in {x.shape[-1]}, the weight is {list(shape)}")
    return x.new_empty((*experts.shape, shape[1] // 2))
