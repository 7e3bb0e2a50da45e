"""Parts of stored NF4 weights: the checkpoint's own codes and scales, neither quantized again nor expanded."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from torch.nn import functional

from nf4_kernels.format import NESTED_BLOCKSIZE, Weight, block_scales
from server.checkpoint.sharding.shards import Part

_ZEROS = 0x77
"""Two codes of the value 0."""


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
    codes = codes_of(packed.reshape(-1), part).to(device)
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


def codes_of(packed: torch.Tensor, part: Part) -> torch.Tensor:
    """The codes of a part, from those of the whole weight, uint8 [n * k / 2]. Raises ValueError as cut_linear()."""
    n, k = part.whole
    columns = part.columns
    if part.is_partial:
        if k % 2 or columns.start % 2 or len(columns) % 2 or part.padding % 2:
            raise ValueError(f"its rows of {k} are not whole bytes")
        own = packed.view(n, k // 2)[:, columns.start // 2 : columns.stop // 2]
        return functional.pad(own, (0, part.padding // 2), value=_ZEROS).reshape(-1)
    pieces = []
    for rows in part.rows:
        if rows.start * k % 2 or len(rows) * k % 2 or part.padding * k % 2:
            raise ValueError(f"its rows of {k} are not whole bytes")
        own = packed[rows.start * k // 2 : rows.stop * k // 2]
        pieces.append(functional.pad(own, (0, part.padding * k // 2), value=_ZEROS) if part.padding else own)
    return torch.cat(pieces)


def scales_of_columns(absmax: torch.Tensor, part: Part, size: int) -> torch.Tensor:
    """The scales of a part of k, [blocks], from the whole weight's; size: of a scale block. ValueError as cut_linear()."""
    (n, k), columns = part.whole, part.columns
    if k % size or columns.start % size or len(columns) % size or part.padding % size:
        raise ValueError(f"{len(columns)} of its {k} columns are not whole scale blocks of {size}")
    own = absmax.reshape(-1).view(n, k // size)[:, columns.start // size : columns.stop // size]
    return functional.pad(own, (0, part.padding // size)).reshape(-1)


def spans_of_rows(part: Part, size: int) -> tuple[list[tuple[int, int]], int]:
    """The first block and the one behind the last of each range of rows, and how many blocks of zeros are behind each.

    size: weights of a scale block. Raises ValueError as cut_linear().
    """
    n, k = part.whole
    spans = []
    for rows in part.rows:
        if rows.start * k % size or (rows.stop * k % size and rows.stop != n) or part.padding * k % size:
            raise ValueError(f"rows {rows.start} to {rows.stop} of {k} are not whole scale blocks of {size}")
        spans.append((rows.start * k // size, -(-rows.stop * k // size)))
    return spans, part.padding * k // size


def joined(tensor: torch.Tensor, spans: list[tuple[int, int]], zeros: int) -> torch.Tensor:
    """Spans of a flat tensor one after another, with as many zeros behind each."""
    flat = tensor.reshape(-1)
    return torch.cat(
        [functional.pad(flat[first:stop], (0, zeros)) if zeros else flat[first:stop] for first, stop in spans]
    )


def groups_of_spans(spans: list[tuple[int, int]], zeros: int) -> list[tuple[int, int, int]] | None:
    """Divide spans that are whole groups of 256 blocks: each one's first group, the one behind its last, and groups of zeros
    behind these; else None, on every rank alike. The last rank's spans may be short or empty where zeros are behind them.
    """
    size, found = NESTED_BLOCKSIZE, []
    for first, stop in spans:
        if (stop - first + zeros) % size or (first % size and first != stop):
            return None
        own = -(-stop // size) - first // size if first != stop else 0
        found.append((first // size, first // size + own, (stop - first + zeros) // size - own))
    return found


def _scales(state: QuantState, part: Part) -> _Scales:
    k, size, nested = part.whole[1], int(state.blocksize), NESTED_BLOCKSIZE
    groups: torch.Tensor | None = state.state2.absmax if state.nested else None
    if part.is_partial:
        absmax, first = scales_of_columns(state.absmax, part, size), part.columns.start // size
        if groups is None:
            return _Scales(absmax)
        skip = k // size - part.shape[1] // size
        last = absmax.numel() - 1
        reached = (first + last + last // (part.shape[1] // size) * skip) // nested + 1
        return _Scales(absmax, _grown(groups, reached), first, skip)
    spans, zeros = spans_of_rows(part, size)
    absmax = joined(state.absmax, spans, zeros)
    if groups is None:
        return _Scales(absmax)
    if len(spans) == 1:
        first, stop = spans[0]
        own = groups[first // nested : -(-stop // nested)]
        return _Scales(absmax, _grown(own, -(-(first % nested + absmax.numel()) // nested)), first % nested)
    whole_groups = groups_of_spans(spans, zeros)
    if whole_groups is not None:
        runs = [_grown(groups[first:stop], stop - first + more) for first, stop, more in whole_groups]
        return _Scales(absmax, torch.cat(runs))
    # Ranges of rows that begin inside groups have no common geometry.
    code = state.state2.code.float()
    whole = block_scales(Weight(state.absmax, part.whole, groups.float(), size, state.absmax, code, state.offset))
    return _Scales(joined(whole, spans, zeros))


def _grown(groups: torch.Tensor, count: int) -> torch.Tensor:
    """At least that many groups: those of the zeros behind a part are zeros."""
    return functional.pad(groups, (0, max(0, count - groups.numel())))
