"""GEMMs that read tiled activations, written by the launch in front of them.

For more than a few tokens, a GEMM on Hopper is one launch that tiles its input and one that multiplies. The launch in
front can write its result tiled instead, if it is decode's attention or a GEMM with a gated activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from nf4_kernels.reference import tiles_shape
from server.engine.runtime.attention.calls import ATTEND_ROTARY
from server.engine.runtime.compile.passes.gates import GATED
from server.engine.runtime.compile.passes.matching import (
    VIEWS,
    bound_arguments_of,
    erase_unused,
    gemm_of,
    in_order,
    reshaped,
    with_value,
)

aten = torch.ops.aten

TileOf = Callable[[torch.device, torch.dtype, int, Sequence[int], int, bool], int]
"""Gives what ops.token_tile() does: the tokens of a tile for gemm_of(node), or 0 where the GEMM reads no tiles."""


def fuse_tiled_inputs(gemms: Iterable[Node], tile_of: TileOf) -> None:
    """Put nf4::tiled_linear in place of GEMMs without a norm whose input the launch in front can write tiled."""
    for gemm in gemms:
        given = bound_arguments_of(gemm)
        x = given["x"]
        # A residual is read as [m, n], so an x that is the residual as well must stay untiled.
        if given.get("norm_weight") is not None or given.get("residual") is x:
            continue
        question = gemm_of(gemm)
        m, tile = question[2], tile_of(*question)
        tiles = _tiles(gemm, x, m, tile) if tile else None
        if tiles is not None:
            _fuse(gemm, tiles, m)


def _tiles(gemm: Node, x: Node, m: int, tile: int) -> Node | None:
    """x [.., k] in tiles, where nothing but the GEMM reads it and the launch that computes it can tile; else None."""
    source, k = _source(x), x.meta["val"].shape[-1]
    # Tiles are 256 k wide. Neither launch pads them where k ends within one.
    if source.target not in (ATTEND_ROTARY, GATED) or len(source.users) > 1 or k % 256:
        return None
    # A reshape may give the GEMM other rows than the source's tokens, and a tile holds whole tokens.
    shape = source.meta["val"].shape
    if m != (shape[0] if source.target is ATTEND_ROTARY else shape[:-1].numel()):
        return None
    value = x.meta["val"].new_empty(tiles_shape(m, k, tile))
    with source.graph.inserting_before(source):
        given = bound_arguments_of(source) | {"tile": tile}
        return with_value(source.graph.call_function(source.target, in_order(source.target, given)), value)


def _source(node: Node) -> Node:
    """The node that the given one only reshapes, as long as nothing else reads the nodes between them."""
    while len(node.users) == 1 and node.target in (*VIEWS, aten.unsqueeze.default):
        source: Any = node.args[0]
        node = source
    return node


def _fuse(gemm: Node, tiles: Node, m: int) -> None:
    """Put a GEMM that reads tiles in place of gemm."""
    tiled, shape = torch.ops.nf4.tiled_linear.default, gemm.meta["val"].shape
    flat = torch.Size((m, shape[-1]))
    with gemm.graph.inserting_before(gemm):
        given = bound_arguments_of(gemm) | {"tiles": tiles, "tokens": m}
        if given.get("residual") is not None:
            given["residual"] = reshaped(given["residual"], flat)
        out = with_value(gemm.graph.call_function(tiled, in_order(tiled, given)), gemm.meta["val"].reshape(flat))
        gemm.replace_all_uses_with(reshaped(out, shape))
    erase_unused(gemm)
