"""What the passes look for in inductor's graphs, and how they change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

aten, prims = torch.ops.aten, torch.ops.prims

# Inductor turns views into reshapes before its passes run.
VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def untouched(graph: Graph) -> list[Node]:
    """The nodes in front of the first one that writes to its arguments."""
    return list(takewhile(lambda node: not _writes(node), graph.nodes))


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def bound_arguments(operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by their names, defaults where the call leaves them out."""
    arguments = operation._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}


def bound_arguments_of(node: Node) -> dict[str, Any]:
    """bound_arguments() of the call that a node makes."""
    assert isinstance(node.target, OpOverload)
    return bound_arguments(node.target, node.args, node.kwargs)


def in_order(operation: OpOverload, given: dict[str, Any]) -> tuple[Any, ...]:
    """An operation's arguments in its order, from given by their names, else defaults."""
    return tuple(given.get(argument.name, argument.default_value) for argument in operation._schema.arguments)


HasLaunch = Callable[[torch.device, torch.dtype, int, Sequence[int], int, bool, bool], bool]
"""Whether there is a fused launch for (*gemm_of(node), with a norm)."""


def gemm_of(node: Node) -> tuple[torch.device, torch.dtype, int, Sequence[int], int, bool]:
    """(device, dtype, m, [n, k], blocksize, nested) of the GEMM that a node computes."""
    given = bound_arguments_of(node)
    x, nested = given["x"].meta["val"], given["absmax_8bit"] is not None
    return x.device, x.dtype, math.prod(x.shape[:-1]), given["shape"], given["blocksize"], nested


@dataclass(frozen=True)
class Norm:
    """h / root mean square of h along its last dimension, in float32, times (weight + offset)."""

    h: Node
    weight: Node
    """[last dimension], of h's dtype. It is one of the model's parameters: launches read it before they wait for others."""
    eps: float
    """Added to the mean square."""
    offset: float


def norm_of(node: Any) -> Norm | None:
    """The norm that a node of 16-bit type computes: Llama's, rounded before the weight, or Gemma's, rounded after it."""
    if not isinstance(node, Node):
        return None
    dtype = node.meta["val"].dtype
    for weight, rounded in operands(node, aten.mul.Tensor):
        found = _normalised(converted(rounded, dtype), node, weight, 0.0)
        if found is not None:
            return found
    for normalised, scale in operands(converted(node, dtype), aten.mul.Tensor):
        for weight, offset in operands(scale, aten.add.Tensor):
            found = _normalised(normalised, node, converted(weight, torch.float32), offset)
            if found is not None:
                return found
    return None


def _normalised(node: Any, whole: Node, weight: Any, offset: Any) -> Norm | None:
    """The norm where the node is h / its root mean square in float32, and h, weight and offset are whole's."""
    for wide, scale in operands(node, aten.mul.Tensor):
        h, eps = _root_mean_square(scale)
        if (
            h is None
            or converted(wide, torch.float32) is not h
            or not is_given(weight)
            or not isinstance(offset, float)
        ):
            continue
        value, size = whole.meta["val"], h.meta["val"].shape[-1:]
        if (h.meta["val"].shape, h.meta["val"].dtype) == (value.shape, value.dtype) and alike(whole, weight, size):
            return Norm(h, weight, eps, offset)
    return None


def _root_mean_square(node: Any) -> tuple[Any, float]:
    """(h, eps) where the node is 1 / sqrt(mean of h's squares + eps), in float32 along the last dimension, or (None, 0)."""
    for mean, eps in operands(argument(node, aten.rsqrt.default), aten.add.Tensor):
        square = argument(mean, aten.mean.dim)
        h = converted(argument(square, aten.pow.Tensor_Scalar), torch.float32)
        if h is None or square.args[1] != 2 or not isinstance(eps, float):
            continue
        if list(mean.args[1]) in ([-1], [h.meta["val"].dim() - 1]) and mean.args[2:] == (True,):
            return h, eps
    return None, 0.0


def reshaped(node: Node, shape: torch.Size) -> Node:
    """The node, or a reshape behind it where it has another shape."""
    if node.meta["val"].shape == shape:
        return node
    view = node.graph.call_function(aten.reshape.default, (node, list(shape)))
    view.meta["val"] = node.meta["val"].reshape(shape)
    return view


def with_value(node: Node, value: torch.Tensor | tuple[torch.Tensor, ...]) -> Node:
    """node, a new call of an operation of ours, with the metadata that it gives a tensor like value, or several."""
    node.meta["val"] = value
    # Without these inductor may pass the operation its arguments in any memory layout.
    node.meta["eager_input_vals"] = torch.fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    return node


def erase_unused(node: Node) -> None:
    """Erase a node that nothing reads any more, and the nodes that only it has read."""
    # A node may be reached twice: the norm reads its input twice.
    if node.op == "call_function" and not node.users and not node._erased:
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        for source in inputs:
            erase_unused(source)


def operands(node: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """The two operands of a node that calls target, in either order; none of other nodes."""
    if isinstance(node, Node) and node.target is target and not node.kwargs:
        yield node.args[0], node.args[1]
        yield node.args[1], node.args[0]


def argument(node: Any, target: Any) -> Any:
    """The first argument of a node that calls target; None of other nodes."""
    return node.args[0] if isinstance(node, Node) and node.target is target and not node.kwargs else None


def converted(node: Any, dtype: torch.dtype) -> Any:
    """What a node converts to dtype; None where it does something else."""
    source = argument(node, prims.convert_element_type.default)
    return source if source is not None and node.args[1] == dtype else None


def is_given(node: Any) -> bool:
    """Whether a node is an input or attribute of the graph, computed by none of its operations."""
    return isinstance(node, Node) and node.op in ("placeholder", "get_attr")


def is_view(node: Any) -> bool:
    """Whether a node is a reshape that keeps the last dimension."""
    if not isinstance(node, Node) or node.target not in VIEWS:
        return False
    source: Any = node.args[0]
    return bool(node.meta["val"].shape[-1:] == source.meta["val"].shape[-1:])


def alike(node: Node, other: Node, shape: torch.Size) -> bool:
    """Whether other is contiguous, of that shape, and of node's dtype and device."""
    value, given = node.meta["val"], other.meta["val"]
    same = (given.shape, given.dtype, given.device) == (shape, value.dtype, value.device)
    return same and bool(given.is_contiguous())
