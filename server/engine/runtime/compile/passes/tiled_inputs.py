"""Products whose input comes in the order in which their launch reads it, from the operation in front of them.

Hopper's launch for more than a few rows is one that arranges its input and one that multiplies. A product that takes its
gated activation along and decode's attention can write their results in that order themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from nf4_kernels.reference import tiles_shape
from server.engine.runtime.attention.base import ATTEND_ROTATED
from server.engine.runtime.compile.passes.gates import GATED
from server.engine.runtime.compile.passes.matching import (
    VIEWS,
    arguments_of,
    erase_unused,
    in_order,
    product_of,
    reshaped,
    with_value,
)

aten = torch.ops.aten

TileRows = Callable[[torch.device, torch.dtype, int, Sequence[int], int, bool], int]
"""ops.token_tile(): the tile of product_of(node), or 0."""


def fuse_arrangements(products: Iterable[Node], tile_rows: TileRows) -> None:
    """Put nf4::tiled_linear in place of products without a norm, where what is in front of them can arrange."""
    for product in products:
        arguments = arguments_of(product)
        x = arguments["x"]
        # What is added as it is has to be there in rows as well.
        if arguments.get("norm_weight") is not None or arguments.get("residual") is x:
            continue
        asked = product_of(product)
        rows, tile = asked[2], tile_rows(*asked)
        tiles = _tiles(product, x, rows, tile) if tile else None
        if tiles is not None:
            _fuse(product, tiles, rows)


def _tiles(product: Node, x: Node, rows: int, tile: int) -> Node | None:
    """x [.., K] in tiles, where nothing but the product reads it and what makes it can arrange; else None."""
    source, k = _source(x), x.meta["val"].shape[-1]
    # Where rows end within 256 k, tiles would have columns that neither of them has.
    if source.target not in (ATTEND_ROTATED, GATED) or len(source.users) > 1 or k % 256:
        return None
    # Not where the product takes as a row what is none there.
    shape = source.meta["val"].shape
    if rows != (shape[0] if source.target is ATTEND_ROTATED else shape[:-1].numel()):
        return None
    value = x.meta["val"].new_empty(tiles_shape(rows, k, tile))
    with source.graph.inserting_before(source):
        arguments = arguments_of(source) | {"tile": tile}
        return with_value(source.graph.call_function(source.target, in_order(source.target, arguments)), value)


def _source(node: Node) -> Node:
    """What the node is in another shape, as far as nothing else reads what is between."""
    while len(node.users) == 1 and node.target in (*VIEWS, aten.unsqueeze.default):
        source: Any = node.args[0]
        node = source
    return node


def _fuse(product: Node, tiles: Node, rows: int) -> None:
    """The product of what is in tiles."""
    arranged, shape = torch.ops.nf4.tiled_linear.default, product.meta["val"].shape
    flat = torch.Size((rows, shape[-1]))
    with product.graph.inserting_before(product):
        given = arguments_of(product) | {"tiles": tiles, "tokens": rows}
        if given.get("residual") is not None:
            given["residual"] = reshaped(given["residual"], flat)
        out = with_value(
            product.graph.call_function(arranged, in_order(arranged, given)), product.meta["val"].reshape(flat)
        )
        product.replace_all_uses_with(reshaped(out, shape))
    erase_unused(product)
