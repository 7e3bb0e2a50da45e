"""Products whose input comes in the order in which their launch reads it, from the operation in front of them.

Hopper's launch for more than a few rows is one that arranges its input and one that multiplies. A gated activation and
decode's attention can write their results in that order themselves.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from nf4_kernels.reference import tiles_shape
from server.engine.runtime.attention.base import ATTEND_ROTATED
from server.engine.runtime.patterns import (
    VIEWS,
    argument,
    arguments_of,
    converted,
    erase_unused,
    operands,
    reshaped,
    with_value,
)

aten = torch.ops.aten

# From so many rows on an activation arranges; with fewer its own launch and one that arranges take no longer
# (docs/adr/0013-arranged-input.md).
_GATED = 33

TileRows = Callable[[torch.device, torch.dtype, int, Sequence[int], int, bool], int]
"""ops.tile_rows(): the tile of a product of (device, dtype, rows, [N, K], blocksize, nested), or 0."""


def fuse_arrangements(products: Iterable[Node], tile_rows: TileRows) -> None:
    """Put nf4::arranged_linear in place of products without a norm, where what is in front of them can arrange."""
    for product in products:
        arguments = arguments_of(product)
        x, shape = arguments["x"], arguments["shape"]
        # What is added as it is has to be there in rows as well.
        if arguments.get("norm_weight") is not None or arguments.get("residual") is x:
            continue
        value = x.meta["val"]
        rows, nested = math.prod(value.shape[:-1]), arguments["absmax_8bit"] is not None
        tile = tile_rows(value.device, value.dtype, rows, shape, arguments["blocksize"], nested)
        tiles = _tiles(product, x, rows, tile) if tile else None
        if tiles is not None:
            _fuse(product, tiles, rows)


def _tiles(product: Node, x: Node, rows: int, tile: int) -> Node | None:
    """x [.., K] in tiles, where nothing but the product reads it and what makes it can arrange; else None."""
    source, k = _source(x), x.meta["val"].shape[-1]
    if len(source.users) > 1:
        return None
    value = x.meta["val"].new_empty(tiles_shape(rows, k, tile))
    found = _gated(source) if rows >= _GATED else None
    # Not where the product takes an activation's rows otherwise.
    if found is not None and found[0].meta["val"].shape[-1] == 2 * k:
        gate_up, activation = found
        with product.graph.inserting_before(product):
            args = reshaped(gate_up, torch.Size((rows, 2 * k))), tile, activation
            return with_value(product.graph.call_function(torch.ops.nf4.gated_tiles.default, args), value)
    # Where heads end within 256 k, tiles would have columns that the attention does not have.
    if source.target is not ATTEND_ROTATED or source.meta["val"].shape[0] != rows or k % 256:
        return None
    with source.graph.inserting_before(source):
        arguments = arguments_of(source) | {"tile": tile}
        return with_value(source.graph.call_function(ATTEND_ROTATED, tuple(arguments.values())), value)


def _source(node: Node) -> Node:
    """What the node is in another shape, as far as nothing else reads what is between."""
    while len(node.users) == 1 and node.target in (*VIEWS, aten.unsqueeze.default):
        source: Any = node.args[0]
        node = source
    return node


def _fuse(product: Node, tiles: Node, rows: int) -> None:
    """The product of what is in tiles."""
    arranged, shape = torch.ops.nf4.arranged_linear.default, product.meta["val"].shape
    flat = torch.Size((rows, shape[-1]))
    with product.graph.inserting_before(product):
        given = arguments_of(product) | {"tiles": tiles, "rows": rows}
        if given.get("residual") is not None:
            given["residual"] = reshaped(given["residual"], flat)
        args = tuple(given.get(argument.name) for argument in arranged._schema.arguments)
        out = with_value(product.graph.call_function(arranged, args), product.meta["val"].reshape(flat))
        product.replace_all_uses_with(reshaped(out, shape))
    erase_unused(product)


def _gated(node: Node) -> tuple[Node, str] | None:
    """(gate_up, activation) where the node is activation(gate) * up, the halves of gate_up's last dimension."""
    for activated, up in operands(node, aten.mul.Tensor):
        wide, activation = _activated(converted(activated, node.meta["val"].dtype))
        gate_up, half = _half(converted(wide, torch.float32))
        if gate_up is None or half != 0 or _half(up) != (gate_up, 1):
            continue
        value = gate_up.meta["val"]
        same = value.dtype == node.meta["val"].dtype and value.shape[:-1] == node.meta["val"].shape[:-1]
        if same and value.is_contiguous() and value.shape[-1] % 128 == 0:
            return gate_up, activation
    return None


def _half(node: Any) -> tuple[Node | None, int]:
    """(whole, which) where the node is one of the halves of whole's last dimension."""
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
    """(x, activation) where the node is an activation of x in float32 that gated_tiles knows."""
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
