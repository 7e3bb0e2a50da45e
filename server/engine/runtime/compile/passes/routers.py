"""Routers of experts in one launch: nf4::route for softmax, topk and weights, or route_linear, with their GEMM."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

import nf4_kernels.cuda.routing  # noqa: F401 - registers torch.ops.nf4
from server.engine.runtime.compile.passes.matching import (
    argument,
    bound_arguments_of,
    converted,
    erase_unused,
    is_given,
    prims,
    with_value,
)
from server.engine.runtime.compile.passes.selection import Selects, selects_greatest

aten = torch.ops.aten
logger = logging.getLogger(__name__)

Joins = Callable[[torch.device, torch.dtype, int, int, int], bool]
"""As nf4_kernels.cuda.routing.can_route_linear()."""


@dataclass(frozen=True)
class Router:
    """softmax(logits) in float32, its k greatest values, and what is made of them."""

    logits: Node
    k: int
    weights: Node
    """The float32 values, or their quotients by their sums."""
    experts: Node
    """The int64 indices."""
    normalised: bool


def fuse_routers(nodes: Iterable[Node], routes: Selects, joins: Joins) -> None:
    """Put a launch in place of each softmax with a topk behind it for which there is one.

    routes: as can_route(). joins: as can_route_linear(), for launches that compute the logits, too.
    """
    found, joined = 0, 0
    for node in nodes:
        router = _router_of(node)
        if router is not None and selects_greatest(node, _takes(router, routes)):
            joined += _replace(node, router, joins)
            found += 1
    if found:
        logger.info("routers of experts in one launch: %d, of which %d compute their logits", found, joined)


def _takes(router: Router, routes: Selects) -> Selects:
    """As routes, for the logits instead of their softmax."""
    dtype = router.logits.meta["val"].dtype
    return lambda device, _, width, k: routes(device, dtype, width, k)


def _router_of(node: Node) -> Router | None:
    """The router whose topk the node is, where nothing else reads the probabilities."""
    if node.target is not aten.topk.default:
        return None
    given = bound_arguments_of(node)
    logits = _softmax_of(given["self"])
    results: dict[Any, Node] = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if logits is None or len(given["self"].users) > 1 or len(results) != len(node.users) or set(results) != {0, 1}:
        return None
    values = results[0]
    for user in values.users:
        if user.target is aten.div.Tensor and user.args[0] is values and _is_sum_of(user.args[1], values):
            total: Any = user.args[1]
            if set(values.users) == {user, total} and set(total.users) == {user}:
                return Router(logits, given["k"], user, results[1], True)
    return Router(logits, given["k"], values, results[1], False)


def _is_sum_of(node: Any, values: Any) -> bool:
    """Whether the node is the sum of values along the last dimension, which is kept."""
    if argument(node, aten.sum.dim_IntList) is not values:
        return False
    given = bound_arguments_of(node)
    return given["keepdim"] and given["dtype"] is None and _is_last(given["dim"], values)


def _is_last(dims: Any, values: Node) -> bool:
    return list(dims) in ([-1], [values.meta["val"].dim() - 1])


def _softmax_of(node: Any) -> Node | None:
    """x where the node is softmax(x) along the last dimension, in float32; x may have a shorter type."""
    if not isinstance(node, Node) or node.target is not aten.div.Tensor or node.meta["val"].dtype != torch.float32:
        return None
    exponential: Any = node.args[0]
    shifted = argument(exponential, aten.exp.default)
    if (
        not _is_sum_of(node.args[1], exponential)
        or not isinstance(shifted, Node)
        or shifted.target is not aten.sub.Tensor
    ):
        return None
    wide, most = shifted.args[0], shifted.args[1]
    if shifted.kwargs or argument(most, aten.amax.default) is not wide or not isinstance(wide, Node):
        return None
    given = bound_arguments_of(most)  # type: ignore[arg-type]
    if not given["keepdim"] or not _is_last(given["dim"], wide):
        return None
    narrow = converted(wide, torch.float32)
    return narrow if isinstance(narrow, Node) and narrow.meta["val"].dtype.is_floating_point else wide


def _gemm_of(router: Router, joins: Joins) -> tuple[Any, ...]:
    """(x, weight) where the logits are x @ weight.T, nothing else reads them, and there is a launch; else ()."""
    logits = router.logits
    if logits.target is not aten.mm.default or len(logits.users) > 1 or logits.kwargs:
        return ()
    x, turned = logits.args
    weight = argument(turned, aten.permute.default) or argument(turned, aten.t.default)
    if not is_given(weight) or not isinstance(x, Node) or not weight.meta["val"].is_contiguous():
        return ()
    (width, hidden), value = weight.meta["val"].shape, x.meta["val"]
    return (x, weight) if joins(value.device, value.dtype, width, hidden, router.k) else ()


def _replace(node: Node, router: Router, joins: Joins) -> bool:
    """Put the launch at the place of the topk; returns whether it computes the logits."""
    value, graph = router.weights.meta["val"], node.graph
    rounded, readers = torch.float32, [router.weights]
    narrowed = [user for user in router.weights.users if user.target is prims.convert_element_type.default]
    if len(narrowed) == len(router.weights.users) == 1 and narrowed[0].args[1] in (torch.bfloat16, torch.float16):
        # Weights that are only read in a shorter type are rounded by the launch; most readers widen them again.
        rounded, readers = narrowed[0].args[1], narrowed  # type: ignore[assignment]
    how = (router.k, router.normalised, rounded)
    gemm = _gemm_of(router, joins)
    operation = torch.ops.nf4.route_linear.default if gemm else torch.ops.nf4.route.default
    with graph.inserting_before(node):
        call = graph.call_function(operation, (*(gemm or (router.logits,)), *how))
        results = value.new_empty(value.shape), router.experts.meta["val"].to(torch.int32)
        with_value(call, results)
        weights, experts = (graph.call_function(operator.getitem, (call, i)) for i in range(2))
        weights.meta["val"], experts.meta["val"] = results
    for reader in readers:
        _hand_over(reader, weights)
    _hand_over(router.experts, experts)
    erase_unused(node)
    return bool(gemm)


def _hand_over(node: Node, wide: Node) -> None:
    """Let the readers of node read wide, which has its values in another type, and erase node."""
    dtype = wide.meta["val"].dtype
    for user in list(node.users):
        if converted(user, dtype) is node:
            user.replace_all_uses_with(wide)
            erase_unused(user)
    if node.users and not node._erased:
        result = wide
        if node.meta["val"].dtype != dtype:
            with node.graph.inserting_before(node):
                result = node.graph.call_function(prims.convert_element_type.default, (wide, node.meta["val"].dtype))
                result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result)
    erase_unused(node)
