"""GEMMs of gates and ups that compute the gated activation, activation(gate) * up, in their epilogue."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

import nf4_kernels.ops  # noqa: F401 - registers torch.ops.nf4
from server.engine.runtime.compile.passes.matching import (
    HasLaunch,
    argument,
    bound_arguments_of,
    converted,
    erase_unused,
    gemm_of,
    in_order,
    is_view,
    operands,
    reshaped,
    with_value,
)

aten = torch.ops.aten

GATED = torch.ops.nf4.gated_linear.default


def fuse_gates(nodes: Iterable[Node], gemms: list[Node], gates: HasLaunch) -> None:
    """Put nf4::gated_linear in place of gated activations of GEMMs that nothing else reads.

    gemms: those that may be replaced; the replaced ones are removed from the list. gates: as ops.can_gate().
    """
    for node in nodes:
        gemm, activation = _gated(node)
        while is_view(gemm):
            gemm = gemm.args[0]
        if gemm in gemms and _can_gate(gemm, gates) and _only_for(node, gemm):
            gemms.remove(gemm)
            _fuse(node, gemm, activation)


def _can_gate(gemm: Node, gates: HasLaunch) -> bool:
    given = bound_arguments_of(gemm)
    normalised = given.get("norm_weight") is not None
    return given.get("residual") is None and gates(*gemm_of(gemm), normalised)


def _only_for(node: Node, gemm: Node) -> bool:
    """Whether nothing but the node reads the GEMM and the values between the two.

    The node must be computed from the GEMM alone.
    """
    between, ahead = {gemm}, [*node.all_input_nodes]
    while ahead:
        source = ahead.pop()
        if source not in between:
            between.add(source)
            ahead += source.all_input_nodes
    return all(user is node or user in between for source in between for user in source.users)


def _fuse(node: Node, gemm: Node, activation: str) -> None:
    """Put the GEMM with its activation at the place of the node."""
    value = gemm.meta["val"]
    half = value.new_empty((*value.shape[:-1], value.shape[-1] // 2))
    with node.graph.inserting_before(node):
        args = in_order(GATED, bound_arguments_of(gemm) | {"activation": activation})
        gated = with_value(node.graph.call_function(GATED, args), half)
        node.replace_all_uses_with(reshaped(gated, node.meta["val"].shape))
    erase_unused(node)


def _gated(node: Node) -> tuple[Any, str]:
    """(gate_up, activation) where the node is activation(gate) * up, the halves of gate_up's last dimension; (None, "")."""
    for activated, up in operands(node, aten.mul.Tensor):
        wide, activation = _activated(converted(activated, node.meta["val"].dtype))
        gate_up, half = _half(converted(wide, torch.float32))
        if gate_up is None or half != 0 or _half(up) != (gate_up, 1):
            continue
        if gate_up.meta["val"].dtype == node.meta["val"].dtype:
            return gate_up, activation
    return None, ""


def _half(node: Any) -> tuple[Node | None, int]:
    """(whole, 0 or 1) where the node is the first or second half of whole's last dimension; (None, 0) of other nodes."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return None, 0
    parts: Any = node.args[0]
    index: Any = node.args[1]
    whole = argument(parts, aten.split_with_sizes.default)
    if whole is None:
        return None, 0
    shape = whole.meta["val"].shape
    halves = list(parts.args[1]) == [shape[-1] // 2] * 2 and parts.args[2:] in ((-1,), (len(shape) - 1,))
    return (whole, index) if halves else (None, 0)


def _activated(node: Any) -> tuple[Any, str]:
    """(x, activation) where the node is an activation of x in float32 that GEMMs have in their epilogue."""
    if isinstance(node, Node) and node.target is aten.div.Tensor:
        x, below = node.args
        for exponential, one in operands(below, aten.add.Tensor):
            if one == 1 and argument(argument(exponential, aten.exp.default), aten.neg.default) is x:
                return x, "silu"
    for x, share in operands(node, aten.mul.Tensor):
        if argument(share, aten.sigmoid.default) is x:
            return x, "silu"
    for half, above in operands(node, aten.mul.Tensor):
        for x, factor in operands(half, aten.mul.Tensor):
            for bent, one in operands(above, aten.add.Tensor):
                if (factor, one) == (0.5, 1) and _is_bent(argument(bent, aten.tanh.default), x):
                    return x, "gelu_tanh"
    return None, ""


def _is_bent(node: Any, x: Any) -> bool:
    """Whether the node is sqrt(2 / pi) * (x + 0.044715 * x * x * x)."""
    for total, factor in operands(node, aten.mul.Tensor):
        if not isinstance(factor, float) or not math.isclose(factor, math.sqrt(2 / math.pi)):
            continue
        for term, straight in operands(total, aten.add.Tensor):
            for cube, small in operands(term, aten.mul.Tensor):
                for square, once in operands(cube, aten.mul.Tensor):
                    if straight is once is x and small == 0.044715 and (x, x) in operands(square, aten.mul.Tensor):
                        return True
    return False
