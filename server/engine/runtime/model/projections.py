"""Linear4bit layers as plain NF4 modules; those that share their input become one GEMM: q/k/v, gate/up."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit
from torch import nn

from nf4_kernels import ops
from nf4_kernels.format import NESTED_BLOCKSIZE, Weight, block_scales, second_level
from server.checkpoint.experts.module import StackedWeight
from server.checkpoint.packed import keeps_fp4
from server.checkpoint.weight import WeightBuffers

# Projections that one module of transformers' model code applies to one input, in the order in which it does so.
GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("w1", "w3"),
)


class NF4Linear(WeightBuffers):
    """One NF4 GEMM. Unlike bitsandbytes' layer it converts no dtype: x and the bias are in the model's dtype.

    One in FP4 computes nothing: model/cpu_linear.py takes its place.
    """

    expanded: torch.Tensor | None
    """The weight [out_features, in_features] in the model's dtype, where memory is spent on it; see model/expanded.py."""

    EXPANDED_FROM = 129
    """Tokens from which on the expanded weight is used: with fewer the NF4 kernels read a quarter of its bytes."""

    fused_up_to: int
    """The most tokens that are multiplied by the codes, in launches with norm, activation and sum."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.out_features, self.in_features = weight.matrix
        self.register_buffer("expanded", None, persistent=False)
        self.fused_up_to = self.EXPANDED_FROM - 1

    @classmethod
    def of(cls, layer: Linear4bit) -> NF4Linear:
        """A layer's weight and bias, which are shared with it."""
        return cls(_weight_of(layer), None if layer.bias is None else layer.bias.data)

    def uses_copy(self, tokens: int) -> bool:
        """Whether the expanded weight computes that many tokens, by cuBLAS."""
        return self.expanded is not None and tokens > self.fused_up_to

    def planned(
        self, tokens: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.device, torch.dtype, int, list[int], int, bool]:
        """The first arguments of ops.can_fuse(), ops.can_gate() and ops.token_tile() for a GEMM."""
        shape, nested = [self.out_features, self.in_features], self.absmax_8bit is not None
        return self.packed.device, dtype, tokens, shape, self.blocksize, nested

    def expand(self, dtype: torch.dtype) -> None:
        """Keep a dequantized copy of the weight in dtype beside the codes; it equals bitsandbytes' bit for bit."""
        self.expanded = ops.dequantize(self.weight, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] to [..., out_features]."""
        if self.expanded is not None and self.uses_copy(x.shape[:-1].numel()):
            return torch.nn.functional.linear(x, self.expanded, self.bias)
        return ops.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Text that print(model) has of it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, blocksize={self.blocksize}"


class _Shared:
    """The outputs of a group's one GEMM and the input that they are of, until each member has been called with it."""

    def __init__(self) -> None:
        self.x: torch.Tensor | None = None
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.left = 0


class GroupMember(nn.Module):
    """A projection of a group. The member that is called first computes all outputs; the others return their parts."""

    def __init__(
        self, index: int, sizes: list[int], shared: _Shared, linear: nn.Module | None, first: GroupMember | None
    ) -> None:
        """first: the group's first member, in the others."""
        super().__init__()
        self._index = index
        self.sizes = sizes
        """Columns of each member's result."""
        self._shared = shared
        self.linear = linear
        """The group's GEMM, in its first member only."""
        self._first = (first,)  # in a tuple, or it would be a part of this module
        self.out_features = sizes[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] to [..., this member's out_features]; a view of the group's result."""
        shared = self._shared
        if shared.x is not x:
            linear = (self._first[0] or self).linear
            assert linear is not None
            shared.outputs, shared.x, shared.left = linear(x).split(self.sizes, -1), x, len(self.sizes)
        out = shared.outputs[self._index]
        shared.left -= 1
        if shared.left == 0:
            shared.x, shared.outputs = None, ()
        return out


def replace_projections(model: nn.Module) -> int:
    """Put every Linear4bit of model on the nf4 op in place, grouped where GROUPS says; returns how many there were.

    Layers that are neither NF4 nor, on CPU, FP4, or nested otherwise than in blocks of 256, stay bitsandbytes' own. On a
    GPU all weights in NF4 move, those of experts, too.
    """
    places = Counter(id(child) for parent in model.modules() for child in parent.children())
    shared = {child for child, count in places.items() if count > 1}
    return sum(_replace_in(block, shared) for block in list(_blocks(model))) + _replace_in(model, shared, moves=False)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of a module's lists of modules, such as decoder layers, in their order."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _blocks(child)


def _replace_in(block: nn.Module, shared: Set[int], moves: bool = True) -> int:
    """Do as replace_projections() does in a part of the model.

    shared: the ids of modules that have several parents, whose weights other blocks may need.

    moves: on a GPU joined weights would leave holes where their parts lay, which the allocator gives back in whole pages of
    20 MiB only. So all of a block's weights move before any is freed, to where those of the block before lay.
    """
    replaced: list[Linear4bit] = []
    kept = []
    for parent in list(block.modules()):
        _expand_read_weights(parent)
        for names in GROUPS:
            layers = [getattr(parent, name, None) for name in names]
            if all(isinstance(layer, Linear4bit) and _is_ours(layer) for layer in layers) and _fit(layers):
                _group(parent, names, layers)
                replaced += layers
        for name, child in list(parent.named_children()):
            linear = NF4Linear.of(child) if isinstance(child, Linear4bit) and _is_ours(child) else None
            if linear is not None:
                setattr(parent, name, linear)
                replaced.append(child)
            if moves and isinstance(weight := linear or child, NF4Linear | StackedWeight):
                kept.append(_move(weight))
    for layer in replaced:
        # bitsandbytes' parameters are part of reference cycles. The garbage collector would free them too late: they are
        # two thirds of a model.
        if id(layer) not in shared:
            layer._parameters.clear()
    return len(replaced)


def _move(module: WeightBuffers) -> list[torch.Tensor]:
    """Copy the buffers of a module on a GPU to other memory; returns those of before."""
    moved = {name: buffer for name, buffer in module.named_buffers() if buffer.is_cuda}
    for name, buffer in moved.items():
        setattr(module, name, buffer.clone())
    return list(moved.values())


def _expand_read_weights(parent: nn.Module) -> None:
    """Make plain layers of those whose weight the forward of parent's class reads itself, as some routers do."""
    layers = {name: child for name, child in parent.named_children() if isinstance(child, Linear4bit)}
    read = _read_weights(type(parent).forward) if layers else frozenset()
    for name, layer in layers.items():
        if name in read:
            setattr(parent, name, plain_linear(layer, layer.compute_dtype))


def plain_linear(layer: Linear4bit, dtype: torch.dtype) -> nn.Linear:
    """A layer with its weight in dtype, not packed."""
    plain = nn.Linear(layer.in_features, layer.out_features, device="meta")
    weight = ops.dequantize(_weight_of(layer), dtype)
    plain.weight, plain.bias = nn.Parameter(weight, requires_grad=False), layer.bias
    return plain


@functools.cache
def _read_weights(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of the attributes whose weight a class's forward reads."""
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return frozenset()
    return frozenset(re.findall(r"self\.(\w+)\.weight\b", source))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the codes and scales of all NF4Linear modules and experts."""
    return sum(module.nbytes for module in model.modules() if isinstance(module, WeightBuffers))


def _is_ours(layer: Linear4bit) -> bool:
    state = layer.weight.quant_state
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return False
    if state.quant_type != "nf4" and not (state.quant_type == "fp4" and keeps_fp4(layer.weight.device)):
        return False
    return not state.nested or state.state2.blocksize == NESTED_BLOCKSIZE


def _fit(layers: list[Any]) -> bool:
    """Whether the layers' codes and scale blocks can be joined along n."""
    states = [layer.weight.quant_state for layer in layers]
    first = states[0]
    return (
        all(
            s.shape[1] == first.shape[1]
            and s.blocksize == first.blocksize
            and s.shape.numel() % s.blocksize == 0
            and s.quant_type == first.quant_type
            for s in states
        )
        and len({layer.bias is None for layer in layers}) == 1
    )


def _group(parent: nn.Module, names: tuple[str, ...], layers: list[Any]) -> None:
    bias = None if layers[0].bias is None else torch.cat([layer.bias.data for layer in layers])
    linear = NF4Linear(_joined([_weight_of(layer) for layer in layers]), bias)
    sizes = [layer.out_features for layer in layers]
    shared = _Shared()
    first = GroupMember(0, sizes, shared, linear, None)
    setattr(parent, names[0], first)
    for index, name in enumerate(names[1:], 1):
        setattr(parent, name, GroupMember(index, sizes, shared, None, first))


def _joined(weights: list[Weight]) -> Weight:
    """Weights of one table, blocksize and k, in whole scale blocks, joined along n."""
    first = weights[0]
    shape = (sum(weight.matrix[0] for weight in weights), first.matrix[1])
    packed = torch.cat([weight.packed for weight in weights])
    if not _nested_fit(weights):
        absmax = torch.cat([block_scales(weight) for weight in weights])
        return Weight(packed, shape, absmax, first.blocksize, table=first.table)
    nested = [second_level(weight) for weight in weights]
    return replace(
        first,
        packed=packed,
        shape=shape,
        absmax=torch.cat([weight.absmax for weight in weights]),
        absmax_8bit=torch.cat([codes for codes, *_ in nested]),
        absmax_offset=torch.cat(
            [offset.reshape(1).expand(w.absmax.numel()) for w, (_, _, offset, _) in zip(weights, nested, strict=True)]
        ),
    )


def _nested_fit(weights: list[Weight]) -> bool:
    """Whether the nested scales can be joined, too: whole groups of 256 scale blocks, and one code table."""
    first = weights[0].absmax_code
    return first is not None and all(
        weight.has_own_groups
        and weight.absmax_code is not None
        and math.prod(weight.shape) % (weight.blocksize * NESTED_BLOCKSIZE) == 0
        and torch.equal(weight.absmax_code, first)
        for weight in weights
    )


def _weight_of(layer: Linear4bit) -> Weight:
    state: QuantState = layer.weight.quant_state
    weight = Weight.from_quant_state(layer.weight, state, (state.quant_type,))
    # In a shard (server.checkpoint.sharding.slices): where its blocks lie in the whole weight's groups.
    offset, skip = getattr(layer, "group_offset", 0), getattr(layer, "group_skip", 0)
    return replace(weight, group_offset=offset, group_skip=skip)
