"""The exchange in front of a residual adds it: one launch instead of two where a sum over the ranks is one launch."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import Node

from server.engine.runtime.compile.passes.matching import alike, erase_unused, is_view, operands, reshaped

aten = torch.ops.aten


def fuse_exchanged_residuals(nodes: Iterable[Node], most_bytes: int) -> None:
    """Put all_reduce_add in place of an all_reduce of up to most_bytes and the sum of its result and a residual."""
    for node in nodes:
        for term, residual in operands(node, aten.add.Tensor):
            result = _result(term)
            if result is None or not isinstance(residual, Node) or residual is term:
                continue
            value = result.meta["val"]
            if _bytes(value) <= most_bytes and alike(term, residual, term.meta["val"].shape):
                _fuse(node, result, residual)
                break


def _result(node: Any) -> Node | None:
    """The result of an all_reduce that a node is, or is a view of, where nothing else reads it; else None."""
    while is_view(node) and len(node.users) == 1:
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not operator.getitem or len(node.users) != 1:
        return None
    call: Any = node.args[0]
    if call.target is not auto_functionalized_v2 or len(call.users) != 1:
        return None
    return node if call.args[0] is torch.ops.nf4_server_exchange.all_reduce.default else None


def _bytes(value: torch.Tensor) -> float:
    """Bytes of a tensor; infinity where its sizes vary."""
    if not all(isinstance(size, int) for size in value.shape):
        return math.inf
    return value.numel() * value.dtype.itemsize


def _fuse(total: Node, result: Node, residual: Node) -> None:
    """The exchange with its residual, at the place of their sum."""
    call: Any = result.args[0]
    value = result.meta["val"]
    with total.graph.inserting_before(total):
        added = {"residual": reshaped(residual, value.shape)}
        operation = torch.ops.nf4_server_exchange.all_reduce_add.default
        fused = total.graph.call_function(auto_functionalized_v2, (operation,), {**added, **call.kwargs})
        fused.meta["val"] = call.meta["val"]
        item = total.graph.call_function(operator.getitem, (fused, result.args[1]))
        item.meta["val"] = value
        total.replace_all_uses_with(reshaped(item, total.meta["val"].shape))
    erase_unused(total)
