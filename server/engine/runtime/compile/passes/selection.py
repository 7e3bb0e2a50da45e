"""Routers of experts that select by one launch: nf4::top_k in the places of torch.topk."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.fx import Node

import nf4_kernels.cuda.top_k  # noqa: F401 - registers torch.ops.nf4
from server.engine.runtime.compile.passes.matching import bound_arguments_of, erase_unused, with_value

aten = torch.ops.aten

Selects = Callable[[torch.device, torch.dtype, int, int], bool]
"""As nf4_kernels.cuda.top_k.can_select()."""


def fuse_selections(nodes: Iterable[Node], selects: Selects) -> None:
    """Put nf4::top_k in place of each topk of the greatest values of rows for which there is a launch."""
    for node in nodes:
        if node.target is aten.topk.default and selects_greatest(node, selects):
            _replace(node)


def selects_greatest(node: Node, selects: Selects) -> bool:
    """Whether the node, a topk, selects the greatest values of rows for which there is a launch."""
    given = bound_arguments_of(node)
    x, k, dim = given["self"].meta["val"], given["k"], given["dim"]
    width = x.shape[-1] if x.dim() else None
    if not given["largest"] or dim not in (-1, x.dim() - 1) or not isinstance(width, int) or not isinstance(k, int):
        return False
    return selects(x.device, x.dtype, width, k)


def _replace(node: Node) -> None:
    given = bound_arguments_of(node)
    with node.graph.inserting_before(node):
        call = node.graph.call_function(torch.ops.nf4.top_k.default, (given["self"], given["k"]))
        selected = with_value(call, node.meta["val"])
    node.replace_all_uses_with(selected)
    erase_unused(node)
