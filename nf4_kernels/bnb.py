"""Routes bitsandbytes through the nf4 ops: Linear4bit.forward everywhere, and bitsandbytes::gemm_4bit on CUDA.

Linear4bit.forward is replaced because on CPUs with AVX512-BF16 bitsandbytes' own repacks the weight in place, with scales
rounded to bfloat16. Weights that it has repacked before are unpacked again; their scales stay rounded. What these kernels do
not take (FP4, nested blocks other than 256) goes to bitsandbytes as before.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse
from bitsandbytes.nn import Linear4bit
from bitsandbytes.nn.modules import fix_4bit_weight_quant_state_from_module
from torch import Tensor

from nf4_kernels import cpu, cuda, ops
from nf4_kernels.format import Weight
from nf4_kernels.params import DTYPES

logger = logging.getLogger(__name__)

# Names in a layer's __dict__, which state_dict does not see.
_WEIGHT = "_nf4_weight"
_CALL = "_nf4_call"
_original_forward = Linear4bit.forward
_overrides: torch.library.Library | None = None
_layers: weakref.WeakSet[Any] = weakref.WeakSet()  # the layers that keep something under these names
_said: set[str] = set()
_LOAD_ERRORS: dict[str, Callable[[], str | None]] = {"cpu": cpu.load_error, "cuda": cuda.load_error}


def enable() -> None:
    """Run every Linear4bit layer of this process, present and future, on the nf4 ops. Calling it again changes nothing.

    Where the kernels of a device cannot be used, its layers stay on bitsandbytes' own, and a warning says so once with the
    reason. On the CPU, layers that accelerate has already wrapped in hooks (offloaded models) keep bitsandbytes'
    forward, which the hooks call.
    """
    global _overrides  # noqa: PLW0603 - the registration lives as long as this object
    if Linear4bit.forward is _forward:
        return
    Linear4bit.forward = _forward
    if torch.cuda.is_available() and _has_kernels("cuda"):
        _overrides = torch.library.Library("bitsandbytes", "IMPL")
        _overrides.impl("gemm_4bit", _gemm_4bit, "CUDA", allow_override=True)


def disable() -> None:
    """Give Linear4bit and gemm_4bit back to bitsandbytes."""
    global _overrides  # noqa: PLW0603
    Linear4bit.forward = _original_forward
    _overrides = None
    for layer in _layers:
        # bitsandbytes may now replace the weight, and what is kept here would keep the old one in memory.
        layer.__dict__.pop(_WEIGHT, None)
        layer.__dict__.pop(_CALL, None)
    _layers.clear()


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
            grad_x = gradient @ torch.ops.nf4.dequantize(*weight.arguments(), gradient.dtype)
        if ctx.has_bias and ctx.needs_input_grad[1]:
            grad_bias = gradient.flatten(0, -2).sum(0)
        return grad_x, grad_bias, None


class _Source:
    """The parts of a layer that a call was prepared from; compared later, they tell whether it is still valid."""

    def __init__(self, layer: Any) -> None:
        self._packed = layer.weight
        self._state = self._packed.quant_state
        self._absmax = self._state.absmax
        self._pointer = self._packed.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None, because a copied layer has tensors of its own."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None, for the same reason."""
        return type(None), ()

    def is_of(self, layer: Any) -> bool:
        packed = layer._parameters.get("weight")
        return (
            packed is self._packed
            and packed.quant_state is self._state
            and self._state.absmax is self._absmax
            and packed.data_ptr() == self._pointer
        )


class _KeptWeight(_Source):
    """A layer's weight for the ops; None where bitsandbytes' own path has to run."""

    def __init__(self, layer: Any, weight: Weight | None) -> None:
        super().__init__(layer)
        self.weight = weight


class _KeptCall(_Source):
    """A layer's call of the CPU kernels without the dispatcher in between, which costs more than a small GEMM."""

    def __init__(self, layer: Any, weight: Weight) -> None:
        super().__init__(layer)
        self.bias: Tensor | None = layer.bias
        self.dtype: torch.dtype = layer.compute_dtype
        self._bias_pointer = 0 if self.bias is None else self.bias.data_ptr()
        self.run = cpu.PreparedLinear(weight, self.bias)

    def is_of(self, layer: Any) -> bool:
        bias = layer._parameters.get("bias")
        return (
            bias is self.bias
            and (bias is None or bias.data_ptr() == self._bias_pointer)
            and layer.compute_dtype is self.dtype
            and super().is_of(layer)
        )


def _is_plain(x: Any) -> bool:
    """Whether x is an ordinary CPU tensor of which only the result is wanted: no compiler, tracer or mode is active."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _forward(self: Any, x: Tensor) -> Tensor:
    """Linear4bit.forward on the nf4 ops: x is computed in the layer's compute dtype, and the result has x's own."""
    if not torch.compiler.is_compiling():
        kept: _KeptCall | None = self.__dict__.get(_CALL)
        if kept is not None and _is_plain(x) and not _wants_gradient(x, kept.bias) and kept.is_of(self):
            if x.dtype is kept.dtype:
                return kept.run(x)
            return kept.run(x.to(kept.dtype)).to(x.dtype)
    fix_4bit_weight_quant_state_from_module(self)
    weight = _weight_of(self) if _has_kernels(x.device.type) else None
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
    if _wants_gradient(x, bias):
        result: Tensor = _Linear.apply(x, bias, weight)  # type: ignore[no-untyped-call, unused-ignore]
    else:
        result = _call(x, bias, weight)
    _keep_call(self, weight)
    return result if result.dtype == given else result.to(given)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernels(device_type: str) -> bool:
    """Whether the kernels of a device can be used; if not, a warning says once why."""
    load_error = _LOAD_ERRORS.get(device_type)
    reason = f"there are none for {device_type}" if load_error is None else load_error()
    if reason is not None and device_type not in _said:
        _said.add(device_type)
        logger.warning(
            "Linear4bit on %s stays on bitsandbytes' own kernels, not on nf4_kernels: %s", device_type, reason
        )
    return reason is None


def _wants_gradient(x: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def _keep_call(layer: Any, weight: Weight) -> None:
    """Prepare the layer's next call, where the CPU kernels can take it directly and nothing is prepared yet."""
    bias, dtype = layer.bias, layer.compute_dtype
    if torch.compiler.is_compiling() or layer.weight.device.type != "cpu" or cpu.load_error() is not None:
        return
    if dtype not in DTYPES or (bias is not None and (bias.dtype is not dtype or not bias.is_contiguous())):
        return
    kept: _KeptCall | None = layer.__dict__.get(_CALL)
    if kept is None or not kept.is_of(layer):
        layer.__dict__[_CALL] = _KeptCall(layer, weight)
        _layers.add(layer)


def _call(x: Tensor, bias: Tensor | None, weight: Weight) -> Tensor:
    out: Tensor = torch.ops.nf4.linear(x, *weight.arguments(), bias)
    return out


def _weight_of(layer: Any) -> Weight | None:
    """The layer's weight for the ops, kept with the layer; None where bitsandbytes' own path has to run."""
    if torch.compiler.is_compiling():
        return _make_weight(layer)  # the tracer puts this into the graph once
    kept: _KeptWeight | None = layer.__dict__.get(_WEIGHT)
    if kept is None or not kept.is_of(layer):
        kept = layer.__dict__[_WEIGHT] = _KeptWeight(layer, _make_weight(layer))
        _layers.add(layer)
    return kept.weight


def _make_weight(layer: Any) -> Weight | None:
    try:
        _unpack(layer)
        weight = Weight.from_quant_state(layer.weight, layer.weight.quant_state)
        _check_shape(weight)
    except ValueError as e:
        if str(e) not in _said:
            _said.add(str(e))
            logger.warning("a Linear4bit layer stays on bitsandbytes' own kernels: %s", e)
        return None
    return weight


def _unpack(layer: Any) -> None:
    """Undo what bitsandbytes' forward on CPU has done to a weight in NF4, but for the rounding of its scales."""
    state = layer.weight.quant_state
    if not getattr(state, "packing_format_for_cpu", False) or state.quant_type != "nf4":
        return
    state.original_nested = False  # else the scales would be quantized once more
    packed, state = _convert_weight_packed_for_cpu_inverse(layer.weight.data, state)
    state.absmax = state.absmax.T.reshape(-1).float()
    layer.weight.data, layer.weight.quant_state = packed, state
    if "unpacked" not in _said:
        _said.add("unpacked")
        logger.warning(
            "bitsandbytes ran before enable() and has rounded the scales of the layers that it repacked to bfloat16; "
            "load the model again to have the checkpoint's own"
        )


def _check_shape(weight: Weight) -> None:
    if len(weight.shape) != 2:
        raise ValueError(f"its weight has shape {list(weight.shape)}, not [N, K]")


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
    return _call(x, bias, Weight(data, tuple(shape), absmax, blocksize, absmax_8bit, absmax_code, absmax_offset))


_libraries = (cpu, ops)  # imported because it registers torch.ops.nf4
