"""Attention that computes the rotary embedding of its queries and keys, and the norm in front, in its own launch."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from server.engine.runtime.attention.calls import ATTEND, ATTEND_ROTARY
from server.engine.runtime.compile.passes.matching import Norm, argument, erase_unused, norm_of, operands, with_value

aten = torch.ops.aten


@dataclass(frozen=True)
class _Rotated:
    """A rotary embedding that the graph computes: its input, its angles, and the norm in front, if there is one."""

    heads: Node
    """[1, T, heads, dim], any strides but for the last one"""
    norm: Norm | None
    """The norm's h is heads, or heads with permuted dimensions."""
    cos: Node
    """[1, T, dim]"""
    sin: Node


def fuse_rotary(nodes: Iterable[Node]) -> None:
    """Put nf4_server::attend_rotary in place of attention to queries and keys with Llama's rotary embedding."""
    for node in nodes:
        if node.target is ATTEND:
            query, key = _rotated(node.args[0]), _rotated(node.args[1])
            # A launch rotates both by the same angles, and normalises both alike or neither.
            if query is not None and key is not None and _shared(query) == _shared(key):
                _fuse(node, query, key)


def _shared(rotated: _Rotated) -> tuple[Node, Node, tuple[float, float] | None]:
    """What queries and keys must have in common for one launch."""
    norm = rotated.norm
    return rotated.cos, rotated.sin, None if norm is None else (norm.eps, norm.offset)


def _fuse(attend: Node, query: _Rotated, key: _Rotated) -> None:
    graph = attend.graph

    def first(source: Node) -> Node:
        node = graph.call_function(aten.select.int, (source, 0, 0))
        node.meta["val"] = source.meta["val"].select(0, 0)
        return node

    with graph.inserting_before(attend):
        cos, sin, constants = _shared(query)
        weights = [None if rotated.norm is None else rotated.norm.weight for rotated in (query, key)]
        args = first(query.heads), first(key.heads), attend.args[2], first(cos), first(sin)
        fused = graph.call_function(ATTEND_ROTARY, (*args, *weights, *(constants or (0.0, 0.0))))
        attend.replace_all_uses_with(with_value(fused, attend.meta["val"]))
    erase_unused(attend)


def _rotated(node: Any) -> _Rotated | None:
    """What is rotated in a node [T, heads, dim]: x * cos + (-x's second half, x's first half) * sin."""
    for straight, crossed in operands(_transposed(node), aten.add.Tensor):
        for x, factor in operands(straight, aten.mul.Tensor):
            for turned, other_factor in operands(crossed, aten.mul.Tensor):
                if _turned(turned) is x:
                    heads, norm = _heads(x)
                    cos, sin = _angles(factor, x), _angles(other_factor, x)
                    if heads is not None and cos is not None and sin is not None:
                        return _Rotated(heads, norm, cos, sin)
    return None


def _heads(x: Node) -> tuple[Node | None, Norm | None]:
    """(heads [1, T, heads, dim], norm) where x [1, heads, T, dim] is their norm; without a norm: (heads, None)."""
    # Gemma normalises behind the permutation.
    norm = norm_of(x)
    permuted = x if norm is None else norm.h
    heads = argument(permuted, aten.permute.default)
    if heads is None or permuted.args[1] != [0, 2, 1, 3]:
        return None, None
    if norm is None:
        norm = norm_of(heads)
        heads = heads if norm is None else norm.h
    return (heads, norm) if heads.meta["val"].stride(-1) == 1 else (None, None)


def _transposed(node: Any) -> Any:
    """[1, heads, T, dim] where the node is the same as [T, heads, dim]."""
    selected = argument(node, aten.permute.default)
    if selected is None or node.args[1] != [1, 0, 2]:
        return None
    source = argument(selected, aten.select.int)
    return source if source is not None and selected.args[1:] == (0, 0) and source.meta["val"].shape[0] == 1 else None


def _turned(node: Any) -> Any:
    """x [1, heads, T, dim] where the node is x's second half, negated, and then its first."""
    parts = argument(node, aten.cat.default)
    if parts is None or len(parts) != 2 or node.args[1:] not in ((-1,), (3,)):
        return None
    negated, first = argument(parts[0], aten.neg.default), parts[1]
    x, same = argument(first, aten.slice.Tensor), argument(negated, aten.slice.Tensor)
    if x is None or x is not same:
        return None
    half = x.meta["val"].shape[-1] // 2
    # A slice to the end may say so by the largest integer.
    to_the_end = (3, half, 2 * half), (3, half, sys.maxsize)
    even = x.meta["val"].shape[-1] == 2 * half
    return x if even and first.args[1:] == (3, 0, half) and negated.args[1:] in to_the_end else None


def _angles(node: Any, x: Node) -> Node | None:
    """Cosines or sines [1, T, dim], contiguous and of x's dtype, where the node is these for all heads of x."""
    source = argument(node, aten.unsqueeze.default)
    if source is None or node.args[1] != 1:
        return None
    value, (_, _, tokens, dim) = source.meta["val"], x.meta["val"].shape
    fits = value.shape == (1, tokens, dim) and value.dtype == x.meta["val"].dtype and value.is_contiguous()
    return source if fits else None
