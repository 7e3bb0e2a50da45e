"""Parts of stored NF4 weights: the checkpoint's own codes and scales, neither quantized again nor expanded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn

from nf4_kernels.format import NESTED_BLOCKSIZE, Weight, block_scales
from server.checkpoint.sharding.shards import Part


class ShardedLinear(Linear4bit):  # type: ignore[misc]
    """A part of a Linear4bit layer. Its nested scales keep the whole weight's groups of 256 (nf4_kernels.Weight)."""

    group_offset = 0
    group_skip = 0


class _Scales(NamedTuple):
    """A part's scales: the scales of its blocks; of nested scales also the groups that these are in."""

    absmax: torch.Tensor
    groups: torch.Tensor | None = None
    offset: int = 0
    skip: int = 0


def cut_linear(
    packed: torch.Tensor,
    state: QuantState,
    part: Part,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> ShardedLinear:
    """The part of a quantized weight as a layer on device; bias is the part's own.

    packed: its codes, uint8 of any shape; they may be mapped from a file, of which only the part is read. Raises
    ValueError where the part does not begin and end with whole scale blocks.
    """
    n, k = part.whole
    if tuple(state.shape) != (n, k):
        raise ValueError(f"it is of shape {list(state.shape)}, the model's of [{n}, {k}]")
    if state.quant_type != "nf4" or (state.nested and state.state2.blocksize != NESTED_BLOCKSIZE):
        raise ValueError("it is not NF4 with scales that are plain or nested in blocks of 256")
    scales = _scales(state, part)
    nested: Any = None
    if scales.groups is not None:
        groups = scales.groups.to(device, torch.float32, copy=True)
        code = state.state2.code.to(device, torch.float32)
        nested = QuantState(absmax=groups, blocksize=NESTED_BLOCKSIZE, code=code, dtype=torch.float32)
    own = QuantState(
        absmax=scales.absmax.to(device), shape=torch.Size(part.shape), code=state.code.to(device),
        blocksize=int(state.blocksize), quant_type="nf4", dtype=dtype,
        offset=None if nested is None else state.offset.to(device), state2=nested,
    )  # fmt: skip
    codes = _codes(packed.reshape(-1), part).to(device)
    return make_linear(codes, own, (scales.offset, scales.skip), bias, dtype)


def make_linear(
    codes: torch.Tensor, state: QuantState, geometry: tuple[int, int], bias: torch.Tensor | None, dtype: torch.dtype
) -> ShardedLinear:
    """A layer made of codes, uint8 [n * k / 2], and a state of its own; geometry: its group_offset and group_skip."""
    n, k = state.shape
    layer = ShardedLinear(k, n, bias=bias is not None, compute_dtype=dtype, quant_type="nf4", device="meta")
    layer.weight = Params4bit(
        codes.unsqueeze(1), requires_grad=False, quant_state=state, blocksize=state.blocksize, quant_type="nf4",
        bnb_quantized=True, module=layer,
    )  # fmt: skip
    layer.quant_state = state
    layer.compute_type_is_set = True
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(codes.device, dtype), requires_grad=False)
    layer.group_offset, layer.group_skip = geometry
    return layer


def _codes(packed: torch.Tensor, part: Part) -> torch.Tensor:
    n, k = part.whole
    columns = part.columns
    if part.is_partial:
        if k % 2 or columns.start % 2 or len(columns) % 2:
            raise ValueError(f"its rows of {k} are not whole bytes")
        return packed.view(n, k // 2)[:, columns.start // 2 : columns.stop // 2].reshape(-1)
    pieces = []
    for rows in part.rows:
        if rows.start * k % 2 or len(rows) * k % 2:
            raise ValueError(f"its rows of {k} are not whole bytes")
        pieces.append(packed[rows.start * k // 2 : rows.stop * k // 2])
    return torch.cat(pieces)


def _scales(state: QuantState, part: Part) -> _Scales:
    (n, k), size = part.whole, int(state.blocksize)
    groups: torch.Tensor | None = state.state2.absmax if state.nested else None
    if part.is_partial:
        columns = part.columns
        if k % size or columns.start % size or len(columns) % size:
            raise ValueError(f"{len(columns)} of its {k} columns are not whole scale blocks of {size}")
        first, stop, blocks = columns.start // size, columns.stop // size, k // size
        absmax = state.absmax.reshape(-1).view(n, blocks)[:, first:stop].reshape(-1)
        if groups is None:
            return _Scales(absmax)
        return _Scales(absmax, groups, first, blocks - (stop - first))
    spans = []
    for rows in part.rows:
        if rows.start * k % size or (rows.stop * k % size and rows.stop != n):
            raise ValueError(f"rows {rows.start} to {rows.stop} of {k} are not whole scale blocks of {size}")
        spans.append((rows.start * k // size, -(-rows.stop * k // size)))
    absmax = torch.cat([state.absmax.reshape(-1)[first:stop] for first, stop in spans])
    if groups is None:
        return _Scales(absmax)
    nested = NESTED_BLOCKSIZE
    if len(spans) == 1:
        first, stop = spans[0]
        return _Scales(absmax, groups[first // nested : -(-stop // nested)], first % nested)
    if all(first % nested == 0 and (stop - first) % nested == 0 for first, stop in spans):
        return _Scales(absmax, torch.cat([groups[first // nested : stop // nested] for first, stop in spans]))
    # Ranges of rows that begin inside groups have no common geometry.
    code = state.state2.code.float()
    whole = block_scales(Weight(state.absmax, (n, k), groups.float(), size, state.absmax, code, state.offset))
    return _Scales(torch.cat([whole[first:stop] for first, stop in spans]))
