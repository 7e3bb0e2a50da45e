"""GEMMs with NF4 weights and what surrounds them, for CPU and CUDA; two of them are also torch.library ops, with fakes.

linear, fused_linear, tiled_linear and gated_linear compute GEMMs with NF4 weights, linear_bf16w one with a bfloat16
weight; dequantize expands a weight. gated_linear can give the tiled activations that tiled_linear takes.

Argument conventions: docs/architecture.md. Where a compiled library cannot be used, the oracle runs instead, and a warning
says so once with the reason.
"""

from __future__ import annotations

import logging
from types import ModuleType

import torch
from torch import Tensor

from nf4_kernels import cpu, cuda, reference
from nf4_kernels.format import Weight, with_weight

logger = logging.getLogger(__name__)

can_fuse, can_gate, token_tile = cuda.can_fuse, cuda.can_gate, cuda.token_tile
_COMPILED = {"cpu": cpu, "cuda": cuda}
_warned: set[str] = set()


def backend(device_type: str) -> ModuleType:
    """nf4_kernels.cpu or .cuda where it can be used, else the oracle (with a warning, once)."""
    compiled = _COMPILED.get(device_type)
    reason = f"there are no kernels for {device_type}" if compiled is None else compiled.load_error()
    if compiled is not None and reason is None:
        return compiled
    if device_type not in _warned:
        _warned.add(device_type)
        logger.warning("NF4 on %s runs in plain torch, many times slower than the kernels: %s", device_type, reason)
    return reference


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [..., k] times the transposed weight [n, k] plus bias: [..., n] in x's dtype."""
    out: Tensor = backend(x.device.type).linear(x, weight, bias)
    return out


def fused_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    """cuda.fused_linear(), or torch's operations around another backend's linear()."""
    library = backend(x.device.type)
    if library is cuda:
        return cuda.fused_linear(x, weight, bias, residual, norm_weight, norm_eps)
    normalised = x if norm_weight is None else reference.rms_norm(x, norm_weight, norm_eps)
    out: Tensor = library.linear(normalised, weight, bias)
    return out if residual is None else residual + out


def tiled_linear(
    tiles: Tensor, weight: Weight, tokens: int, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """fused_linear() without a norm, of the x [tokens, k] whose tiled activations are tiles."""
    if backend(tiles.device.type) is cuda:
        return cuda.tiled_linear(tiles, tokens, weight, bias, residual)
    return fused_linear(reference.untile_activations(tiles, tokens, weight.shape[1]), weight, bias, residual)


def gated_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    activation: str = "silu",
    tile: int = 0,
) -> Tensor:
    """activation(the first n / 2 columns of fused_linear()) times the others; tiled activations with a tile."""
    if backend(x.device.type) is cuda:
        return cuda.gated_linear(x, weight, bias, norm_weight, norm_eps, activation, tile)
    reference.check_gate(weight.shape[0], activation, tile)
    return reference.gated(fused_linear(x, weight, bias, None, norm_weight, norm_eps), activation, tile)


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a dense tensor of its shape, bit for bit as bitsandbytes gives it."""
    out: Tensor = backend(weight.packed.device.type).dequantize(weight, dtype)
    return out


def linear_bf16w(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., k] times the transposed bfloat16 weight [n, k] plus bias, in x's dtype."""
    if x.device.type == "cpu" and backend("cpu") is cpu:
        return cpu.linear_bf16w(x, weight, bias)
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def _linear_shape(x: Tensor, weight: Weight, *_: object) -> Tensor:
    n, k = weight.shape
    torch._check(x.shape[-1] == k, lambda: f"x ends in {x.shape[-1]}, the weight is {[n, k]}")
    return x.new_empty((*x.shape[:-1], n))


def _dequantized_shape(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.packed.new_empty(list(weight.shape), dtype=dtype)


_library = torch.library.Library("nf4", "DEF")
_library.define(f"linear(Tensor x, {Weight.SCHEMA}, Tensor? bias=None) -> Tensor")
_library.define(f"dequantize({Weight.SCHEMA}, ScalarType dtype) -> Tensor")
for _name, _place, _kernel, _fake in (
    ("linear", 1, linear, _linear_shape),
    ("dequantize", 0, dequantize, _dequantized_shape),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, with_weight(_kernel, _place), _key)
    torch.library.register_fake(f"nf4::{_name}", with_weight(_fake, _place))
