"""GEMMs that normalise their input and add the residual, in the places of the operations around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node

from server.engine.runtime.compile.passes.matching import (
    Norm,
    alike,
    bound_arguments_of,
    erase_unused,
    in_order,
    is_view,
    norm_of,
    operands,
    reshaped,
    with_value,
)

aten = torch.ops.aten


def fuse_residuals(nodes: Iterable[Node], gemms: list[Node]) -> None:
    """Put nf4::fused_linear in place of each sum of a residual and one of gemms; gemms gets the new nodes."""
    for node in nodes:
        found = _residual_sum(node, gemms)
        if found is not None:
            gemm, residual = found
            gemms[gemms.index(gemm)] = _fuse_residual(node, gemm, residual)


def fuse_norms(gemms: list[Node], fits: Callable[[Node], bool]) -> None:
    """Put nf4::fused_linear in place of norms that only GEMMs read; gemms gets the new nodes.

    fits: whether there is a launch for one of gemms with a norm.
    """
    for i, gemm in enumerate(gemms):
        x = bound_arguments_of(gemm)["x"]
        while is_view(x):
            x = x.args[0]
        norm = _norm(x)
        if norm is not None and fits(gemm) and _only_multiplied(x, gemms):
            gemms[i] = _fuse_norm(gemm, norm)


def _residual_sum(node: Node, gemms: list[Node]) -> tuple[Node, Node] | None:
    """(gemm, residual) where the node is their sum and nothing else reads the GEMM; else None.

    As nothing else reads the GEMM, the residual cannot depend on it.
    """
    for term, residual in operands(node, aten.add.Tensor):
        gemm = term
        while is_view(gemm) and len(gemm.users) == 1:
            gemm = gemm.args[0]
        if gemm not in gemms or len(gemm.users) != 1 or bound_arguments_of(gemm).get("residual") is not None:
            continue
        if isinstance(residual, Node) and residual is not term and alike(term, residual, term.meta["val"].shape):
            return gemm, residual
    return None


def _norm(node: Any) -> Norm | None:
    """The norm that a node computes, where GEMMs can do it: over contiguous rows, without an offset to the weight."""
    norm = norm_of(node)
    return norm if norm is not None and not norm.offset and alike(node, norm.h, node.meta["val"].shape) else None


def _only_multiplied(node: Node, gemms: list[Node]) -> bool:
    """Whether GEMMs are all that reads a norm, also through views, and read it as their x.

    Otherwise the norm is computed anyway, and a GEMM that computes it again gains nothing.
    """
    for user in node.users:
        if is_view(user):
            if not _only_multiplied(user, gemms):
                return False
            continue
        # A GEMM that normalises its input does not multiply what it reads.
        if user not in gemms or bound_arguments_of(user).get("norm_weight") is not None:
            return False
        if any(value is node for name, value in bound_arguments_of(user).items() if name != "x"):
            return False
    return True


def _fuse_residual(total: Node, gemm: Node, residual: Node) -> Node:
    """The GEMM with its residual, at the place of their sum."""
    shape = gemm.meta["val"].shape
    with total.graph.inserting_before(total):
        fused = _fused(gemm, residual=reshaped(residual, shape))
        total.replace_all_uses_with(reshaped(fused, total.meta["val"].shape))
    erase_unused(total)
    return fused


def _fuse_norm(gemm: Node, norm: Norm) -> Node:
    """The GEMM with its norm, which reads the norm's input."""
    x = bound_arguments_of(gemm)["x"]
    with gemm.graph.inserting_before(gemm):
        fused = _fused(gemm, x=reshaped(norm.h, x.meta["val"].shape), norm_weight=norm.weight, norm_eps=norm.eps)
    gemm.replace_all_uses_with(fused)
    erase_unused(gemm)
    return fused


def _fused(gemm: Node, **changes: Any) -> Node:
    """A node that computes the GEMM with other arguments."""
    fused = torch.ops.nf4.fused_linear.default
    given = bound_arguments_of(gemm) | changes
    return with_value(gemm.graph.call_function(fused, in_order(fused, given)), gemm.meta["val"])
