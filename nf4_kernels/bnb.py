"""Routes bitsandbytes through the nf4 ops: Linear4bit.forward everywhere, and bitsandbytes::gemm_4bit on CUDA.

Linear4bit.forward is replaced because on CPUs with AVX512-BF16 bitsandbytes' own repacks the weight in place, lossily. What
these kernels do not take (FP4, nested blocks other than 256, weights that bitsandbytes has already repacked) goes to
bitsandbytes as before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from bitsandbytes.nn.modules import fix_4bit_weight_quant_state_from_module
from torch import Tensor

from nf4_kernels import cpu, ops
from nf4_kernels.format import Weight

logger = logging.getLogger(__name__)

_PREPARED = "_nf4_prepared"
_original_forward = Linear4bit.forward
_overrides: torch.library.Library | None = None
_said: set[str] = set()


def enable() -> None:
    """Run every Linear4bit layer of this process, present and future, on the nf4 ops. Calling it again changes nothing."""
    global _overrides  # noqa: PLW0603 - the registration lives as long as this object
    if Linear4bit.forward is _forward:
        return
    Linear4bit.forward = _forward
    if torch.cuda.is_available():
        _overrides = torch.library.Library("bitsandbytes", "IMPL")
        _overrides.impl("gemm_4bit", _gemm_4bit, "CUDA", allow_override=True)


def disable() -> None:
    """Give Linear4bit and gemm_4bit back to bitsandbytes."""
    global _overrides  # noqa: PLW0603
    Linear4bit.forward = _original_forward
    if _overrides is not None:
        _overrides._destroy()
        _overrides = None


class _Linear(torch.autograd.Function):
    """nf4::linear with a gradient for x and bias; the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: Weight) -> Tensor:
        ctx.weight = weight
        ctx.has_bias = bias is not None
        return _call(x, bias, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight: Weight = ctx.weight
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            expanded = torch.ops.nf4.dequantize(
                weight.packed, weight.shape, weight.absmax, weight.blocksize, gradient.dtype, *_nested(weight)
            )
            grad_x = gradient @ expanded
        if ctx.has_bias and ctx.needs_input_grad[1]:
            grad_bias = gradient.flatten(0, -2).sum(0)
        return grad_x, grad_bias, None


def _forward(self: Any, x: Tensor) -> Tensor:
    """Linear4bit.forward on the nf4 ops: x in the layer's compute dtype, the result in x's own."""
    fix_4bit_weight_quant_state_from_module(self)
    weight = _weight_of(self)
    if weight is None:
        out: Tensor = _original_forward(self, x)
        return out
    if not self.compute_type_is_set:
        self.set_compute_type(x)
        self.compute_type_is_set = True
    given = x.dtype
    if self.compute_dtype is not None and self.compute_dtype != given:
        x = x.to(self.compute_dtype)
    bias = self.bias
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        result: Tensor = _Linear.apply(x, bias, weight)  # type: ignore[no-untyped-call]
    else:
        result = _call(x, bias, weight)
    return result if result.dtype == given else result.to(given)


def _call(x: Tensor, bias: Tensor | None, weight: Weight) -> Tensor:
    out: Tensor = torch.ops.nf4.linear(
        x, weight.packed, weight.shape, weight.absmax, weight.blocksize, bias, *_nested(weight)
    )
    return out


def _weight_of(layer: Any) -> Weight | None:
    """The layer's weight for the ops, kept with the layer; None where bitsandbytes' own path has to run."""
    packed, state = layer.weight, layer.weight.quant_state
    kept = layer.__dict__.get(_PREPARED)
    if kept is not None and kept[0] is state and kept[1] is packed and kept[2] == packed.device:
        weight: Weight | None = kept[3]
        return weight
    try:
        weight = Weight.from_quant_state(packed, state)
        _check_shape(weight)
    except ValueError as e:
        if str(e) not in _said:
            _said.add(str(e))
            logger.warning("a Linear4bit layer stays on bitsandbytes' own kernels: %s", e)
        weight = None
    layer.__dict__[_PREPARED] = (state, packed, packed.device, weight)
    return weight


def _check_shape(weight: Weight) -> None:
    if len(weight.shape) != 2:
        raise ValueError(f"its weight has shape {list(weight.shape)}, not [N, K]")


def _nested(weight: Weight) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return weight.absmax_8bit, weight.absmax_code, weight.absmax_offset


def _gemm_4bit(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """bitsandbytes::gemm_4bit on CUDA, for callers that reach it other than through Linear4bit.forward."""
    if quant_type != "nf4":
        from bitsandbytes.backends.default.ops import _gemm_4bit_default_impl

        out: Tensor = _gemm_4bit_default_impl(
            x, packed, shape, absmax, blocksize, quant_type, bias, absmax_8bit, absmax_code, absmax_offset
        )
        return out
    data = packed.reshape(-1).view(torch.uint8)
    out = torch.ops.nf4.linear(x, data, shape, absmax, blocksize, bias, absmax_8bit, absmax_code, absmax_offset)
    return out


_libraries = (cpu, ops)  # imported for their effect: torch.ops.nf4
