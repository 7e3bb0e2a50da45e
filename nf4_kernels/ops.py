"""The torch.library ops of the namespace nf4, for CPU and CUDA, with fakes.

linear, fused_linear, arranged_linear and gated_linear multiply; the last one may give what the one before it takes;
dequantize; linear_bf16w.

Argument conventions: docs/architecture.md. Where a compiled library cannot be used, the oracle runs instead, and a warning
says so once with the reason.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from nf4_kernels import cpu, cuda, reference

logger = logging.getLogger(__name__)

_WEIGHT = "Tensor packed, SymInt[] shape, Tensor absmax, int blocksize"
_NESTED = "Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None"
_library = torch.library.Library("nf4", "DEF")
_library.define(f"linear(Tensor x, {_WEIGHT}, Tensor? bias=None, {_NESTED}) -> Tensor")
_library.define(f"dequantize({_WEIGHT}, ScalarType dtype, {_NESTED}) -> Tensor")
_library.define(
    f"fused_linear(Tensor x, {_WEIGHT}, Tensor? bias=None, {_NESTED}, Tensor? residual=None, Tensor? norm_weight=None,"
    " float norm_eps=0.0) -> Tensor"
)
_library.define(
    f"arranged_linear(Tensor tiles, int rows, {_WEIGHT}, Tensor? bias=None, {_NESTED}, Tensor? residual=None) -> Tensor"
)
_library.define(
    f"gated_linear(Tensor x, {_WEIGHT}, Tensor? bias=None, {_NESTED}, Tensor? norm_weight=None, float norm_eps=0.0,"
    ' str activation="silu", int tile=0) -> Tensor'
)
_library.define("linear_bf16w(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
_warned: set[str] = set()


def backend(device_type: str) -> ModuleType:
    """nf4_kernels.cpu or .cuda where it can be used, else the oracle (with a warning, once)."""
    compiled = {"cpu": cpu, "cuda": cuda}.get(device_type)
    reason = f"there are no kernels for {device_type}" if compiled is None else compiled.load_error()
    if compiled is not None and reason is None:
        return compiled
    if device_type not in _warned:
        _warned.add(device_type)
        logger.warning("NF4 on %s runs in plain torch, many times slower than the kernels: %s", device_type, reason)
    return reference


def _linear(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    out: Tensor = backend(x.device.type).linear(
        x, packed, shape, absmax, blocksize, bias, absmax_8bit, absmax_code, absmax_offset
    )
    return out


def _fused_linear(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
) -> Tensor:
    weight = packed, shape, absmax, blocksize, bias, absmax_8bit, absmax_code, absmax_offset
    if backend(x.device.type) is cuda:
        return cuda.fused_linear(x, *weight, residual, norm_weight, norm_eps)
    out = _linear(x if norm_weight is None else reference.rms_norm(x, norm_weight, norm_eps), *weight)
    return out if residual is None else residual + out


def _arranged_linear(
    tiles: Tensor,
    rows: int,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    weight = packed, shape, absmax, blocksize, bias, absmax_8bit, absmax_code, absmax_offset
    if backend(tiles.device.type) is cuda:
        return cuda.arranged_linear(tiles, rows, *weight, residual)
    return _fused_linear(reference.arranged_rows(tiles, rows, shape[1]), *weight, residual)


def _gated_linear(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    activation: str = "silu",
    tile: int = 0,
) -> Tensor:
    weight = packed, shape, absmax, blocksize, bias, absmax_8bit, absmax_code, absmax_offset
    if backend(x.device.type) is cuda:
        return cuda.gated_linear(x, *weight, norm_weight, norm_eps, activation, tile)
    reference.check_gate(shape[0], activation, tile)
    return reference.gated(_fused_linear(x, *weight, None, norm_weight, norm_eps), activation, tile)


def tile_rows(
    device: torch.device, dtype: torch.dtype, rows: int, shape: Sequence[int], blocksize: int, nested: bool
) -> int:
    """The tile with which nf4::arranged_linear of rows arranges nothing on that device; 0: it always does."""
    return cuda.tile_rows(device, dtype, rows, shape, blocksize, nested) if device.type == "cuda" else 0


def fuses(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    shape: Sequence[int],
    blocksize: int,
    nested: bool,
    normalised: bool,
) -> bool:
    """Whether nf4::fused_linear of x [rows, K], with a norm or without, needs no launches of torch's on that device."""
    return device.type == "cuda" and cuda.fuses(device, dtype, rows, shape, blocksize, nested, normalised)


def gates(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    shape: Sequence[int],
    blocksize: int,
    nested: bool,
    normalised: bool,
) -> bool:
    """Whether nf4::gated_linear of x [rows, K], in rows, with a norm or without, needs none of torch's launches there."""
    return device.type == "cuda" and cuda.gates(device, dtype, rows, shape, blocksize, nested, normalised)


def _dequantize(
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    dtype: torch.dtype,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    out: Tensor = backend(packed.device.type).dequantize(
        packed, shape, absmax, blocksize, dtype, absmax_8bit, absmax_code, absmax_offset
    )
    return out


def _linear_bf16w(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.device.type == "cpu" and backend("cpu") is cpu:
        return cpu.linear_bf16w(x, weight, bias)
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


for _key in ("CPU", "CUDA"):
    _library.impl("linear", _linear, _key)
    _library.impl("fused_linear", _fused_linear, _key)
    _library.impl("arranged_linear", _arranged_linear, _key)
    _library.impl("gated_linear", _gated_linear, _key)
    _library.impl("dequantize", _dequantize, _key)
    _library.impl("linear_bf16w", _linear_bf16w, _key)


def _linear_shape(x: Tensor, packed: Tensor, shape: Sequence[int], *_: object) -> Tensor:
    torch._check(x.shape[-1] == shape[1], lambda: f"x ends in {x.shape[-1]}, the weight is {list(shape)}")
    return x.new_empty((*x.shape[:-1], shape[0]))


for _name in ("linear", "fused_linear"):
    torch.library.register_fake(f"nf4::{_name}", _linear_shape)


@torch.library.register_fake("nf4::arranged_linear")
def _(tiles: Tensor, rows: int, packed: Tensor, shape: Sequence[int], *_: object) -> Tensor:
    torch._check(tiles.shape[1] * 64 >= shape[1], lambda: f"tiles of {tiles.shape[1] * 64} columns, K = {shape[1]}")
    return tiles.new_empty(rows, shape[0])


@torch.library.register_fake("nf4::gated_linear")
def _(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    activation: str = "silu",
    tile: int = 0,
) -> Tensor:
    out = _linear_shape(x, packed, (shape[0] // 2, shape[1]))
    return out.new_empty(reference.tiles_shape(math.prod(out.shape[:-1]), shape[0] // 2, tile)) if tile else out


@torch.library.register_fake("nf4::dequantize")
def _(
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    dtype: torch.dtype,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    return packed.new_empty(list(shape), dtype=dtype)


@torch.library.register_fake("nf4::linear_bf16w")
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    torch._check(x.shape[-1] == weight.shape[1], lambda: f"x ends in {x.shape[-1]}, the weight in {weight.shape[1]}")
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
