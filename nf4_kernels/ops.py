"""The torch.library ops of the namespace nf4, for CPU and CUDA, with fakes.

linear, fused_linear, tiled_linear and gated_linear compute GEMMs with NF4 weights, linear_bf16w one with a bfloat16
weight; dequantize expands a weight. gated_linear can give the tiled activations that tiled_linear takes.

Argument conventions: docs/architecture.md. Where a compiled library cannot be used, the oracle runs instead, and a warning
says so once with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from nf4_kernels import cpu, cuda, fakes, reference
from nf4_kernels.format import Weight, with_weight

logger = logging.getLogger(__name__)

_library = torch.library.Library("nf4", "DEF")
_library.define(f"linear(Tensor x, {Weight.SCHEMA}, Tensor? bias=None) -> Tensor")
_library.define(f"dequantize({Weight.SCHEMA}, ScalarType dtype) -> Tensor")
_library.define(
    f"fused_linear(Tensor x, {Weight.SCHEMA}, Tensor? bias=None, Tensor? residual=None, Tensor? norm_weight=None,"
    " float norm_eps=0.0) -> Tensor"
)
_library.define(
    f"tiled_linear(Tensor tiles, {Weight.SCHEMA}, int tokens, Tensor? bias=None, Tensor? residual=None) -> Tensor"
)
_library.define(
    f"gated_linear(Tensor x, {Weight.SCHEMA}, Tensor? bias=None, Tensor? norm_weight=None, float norm_eps=0.0,"
    ' str activation="silu", int tile=0) -> Tensor'
)
_library.define("linear_bf16w(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
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


def _linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    out: Tensor = backend(x.device.type).linear(x, weight, bias)
    return out


def _fused_linear(
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


def _tiled_linear(
    tiles: Tensor, weight: Weight, tokens: int, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    if backend(tiles.device.type) is cuda:
        return cuda.tiled_linear(tiles, tokens, weight, bias, residual)
    return _fused_linear(reference.untile_activations(tiles, tokens, weight.shape[1]), weight, bias, residual)


def _gated_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    activation: str = "silu",
    tile: int = 0,
) -> Tensor:
    if backend(x.device.type) is cuda:
        return cuda.gated_linear(x, weight, bias, norm_weight, norm_eps, activation, tile)
    reference.check_gate(weight.shape[0], activation, tile)
    return reference.gated(_fused_linear(x, weight, bias, None, norm_weight, norm_eps), activation, tile)


def token_tile(
    device: torch.device, dtype: torch.dtype, tokens: int, shape: Sequence[int], blocksize: int, nested: bool
) -> int:
    """The token tile with which nf4::tiled_linear needs no launch that tiles x on that device; 0 where there is none."""
    return cuda.token_tile(device, dtype, tokens, shape, blocksize, nested) if device.type == "cuda" else 0


def can_fuse(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    shape: Sequence[int],
    blocksize: int,
    nested: bool,
    normalised: bool,
) -> bool:
    """Whether nf4::fused_linear of x [tokens, K], with a norm or without, needs no launches by torch on that device."""
    return device.type == "cuda" and cuda.can_fuse(device, dtype, tokens, shape, blocksize, nested, normalised)


def can_gate(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    shape: Sequence[int],
    blocksize: int,
    nested: bool,
    normalised: bool,
) -> bool:
    """Whether nf4::gated_linear of x [tokens, K] without a tile, with a norm or not, needs no launches by torch."""
    return device.type == "cuda" and cuda.can_gate(device, dtype, tokens, shape, blocksize, nested, normalised)


def _dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    out: Tensor = backend(weight.packed.device.type).dequantize(weight, dtype)
    return out


def _linear_bf16w(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.device.type == "cpu" and backend("cpu") is cpu:
        return cpu.linear_bf16w(x, weight, bias)
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


for _key in ("CPU", "CUDA"):
    for _name, _kernel in (
        ("linear", _linear),
        ("fused_linear", _fused_linear),
        ("tiled_linear", _tiled_linear),
        ("gated_linear", _gated_linear),
    ):
        _library.impl(_name, with_weight(_kernel, 1), _key)
    _library.impl("dequantize", with_weight(_dequantize, 0), _key)
    _library.impl("linear_bf16w", _linear_bf16w, _key)

fakes.register()
