"""Part that a shard has of a mixture's experts: of every expert some gates and ups, and the columns of down behind them.

The router is whole in every shard, so that all choose the same experts, and what these compute is a partial sum. A part's
codes and scales are the checkpoint's own. Nested scales stay nested where the parts of gates and ups are whole groups of
256 scale blocks; those of down, whose rows are parts of rows, become plain float32: the ops of experts know no group_skip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from nf4_kernels import Weight
from server.checkpoint.base import CheckpointError
from server.checkpoint.experts.layout import experts_layouts
from server.checkpoint.experts.loading import ExpertsLoader
from server.checkpoint.experts.names import Part as Projection
from server.checkpoint.experts.names import place_of
from server.checkpoint.experts.tensors import CheckpointTensors, plain
from server.checkpoint.inspection import CheckpointInfo
from server.checkpoint.sharding.shards import Part, Shard
from server.checkpoint.sharding.slices import codes_of, groups_of_spans, joined, scales_of_columns, spans_of_rows
from server.checkpoint.sharding.widths import range_of


@dataclass(frozen=True)
class ExpertsPart:
    """Part that a shard has of one layer's experts (a Cut of server.checkpoint.experts.reader)."""

    whole: int
    """Features between an expert's gates, ups and downs."""
    inner: int
    """Number of them that each shard has, zeros included (see widths.py)."""
    rank: int

    def weight(self, weight: Weight, part: Projection, interleaved: bool) -> Weight:
        """The shard's part of a weight [.., n, k] of one expert or of several, as a matrix. See Cut."""
        n, k = math.prod(weight.shape[:-1]), weight.shape[-1]
        matrix = replace(weight, shape=(n, k))
        if part == "down":
            columns = range_of(k, self.inner, self.rank)
            return _columns(matrix, Part((n, k), (range(n),), columns, self.inner - len(columns)))
        # Gates and ups that take turns are pairs, of which the shard's are one after another.
        size, each = (2 * self.whole, 2 * self.inner) if interleaved else (self.whole, self.inner)
        own = range_of(size, each, self.rank)
        rows = tuple(range(first + own.start, first + own.stop) for first in range(0, n, size))
        return _rows(matrix, Part((n, k), rows, range(k), each - len(own)))

    def bias(self, bias: torch.Tensor, part: Projection) -> torch.Tensor | None:
        """The shard's part of gate_up's biases [experts, 2 whole]; those of down, which are added once, are rank 0's."""
        if part == "down":
            return None if self.rank else bias
        own = range_of(self.whole, self.inner, self.rank)
        halves = bias.view(bias.shape[0], 2, self.whole)[..., own.start : own.stop]
        return functional.pad(halves, (0, self.inner - len(own))).reshape(bias.shape[0], 2 * self.inner)


def experts_of(whole: nn.Module, own: nn.Module, shard: Shard, folder: object) -> dict[str, ExpertsPart]:
    """Part that a shard has of every layer's experts, by the name of their module.

    whole, own: the model as it is and the shard (of shard_config()), which may be on the meta device. Raises
    CheckpointError for a module of experts whose code is not known.
    """
    for name, module in whole.named_modules():
        if isinstance(module, nn.Linear) and place_of(f"{name}.weight"):
            raise CheckpointError(
                f"{folder}: engine.tensor_parallel_size {shard.count}: {name}: experts in modules of their own cannot be"
                " divided"
            )
    parts = {}
    narrow = {layout.name: layout for layout in experts_layouts(own)}
    for layout in experts_layouts(whole):
        if layout.activation is None:
            raise CheckpointError(
                f"{folder}: engine.tensor_parallel_size {shard.count}: {layout.name}: {layout.kind} cannot be divided"
            )
        parts[layout.name] = ExpertsPart(layout.inner, narrow[layout.name].inner, shard.rank)
    return parts


def take_experts(
    model: PreTrainedModel,
    parts: dict[str, ExpertsPart],
    info: CheckpointInfo,
    device: torch.device,
    dtype: torch.dtype,
) -> ExpertsLoader:
    """Take a shard's experts out of it; what is returned fills in their parts. Raises CheckpointError."""
    tensors = CheckpointTensors(info.folder, info.files)
    loader = ExpertsLoader(tensors, device, dtype, info.quantization == "none", parts)
    loader.take_over(model)
    if left := sorted(set(parts) - loader.taken):
        raise CheckpointError(
            f"{info.folder}: {left[0]}: experts in 16 bit beside layers in NF4 cannot be divided among GPUs yet:"
            " engine.tensor_parallel_size must be 1"
        )
    return loader


def _rows(weight: Weight, part: Part) -> Weight:
    """A part of a matrix's rows. Its scales stay nested where they are whole groups, on every rank alike."""
    spans, zeros = spans_of_rows(part, weight.blocksize)
    codes = codes_of(weight.packed.reshape(-1), part)
    groups = None if weight.absmax_8bit is None else groups_of_spans(spans, zeros)
    if groups is None or weight.absmax_8bit is None or weight.absmax_offset is None:
        return Weight(codes, part.shape, joined(plain(weight).absmax, spans, zeros), weight.blocksize)
    absmax, offsets = weight.absmax.reshape(-1), weight.absmax_offset.reshape(-1).float()
    offsets = offsets.expand(absmax.numel())
    found = [
        torch.cat([functional.pad(level[first:stop], (0, more)) for first, stop, more in groups])
        for level in (absmax, offsets)
    ]
    eight_bit = joined(weight.absmax_8bit, spans, zeros)
    return Weight(codes, part.shape, found[0], weight.blocksize, eight_bit, weight.absmax_code, found[1])


def _columns(weight: Weight, part: Part) -> Weight:
    """A part of a matrix's columns, with plain scales: its rows skip blocks of the whole weight's groups."""
    codes = codes_of(weight.packed.reshape(-1), part)
    absmax = scales_of_columns(plain(weight).absmax, part, weight.blocksize)
    return Weight(codes, part.shape, absmax, weight.blocksize)
