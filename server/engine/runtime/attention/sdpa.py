"""The reference backend: gathers each sequence's blocks and calls torch's scaled dot-product attention. Any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from nf4_kernels.cpu.huge_pages import HugePages
from server.engine.runtime.attention.base import AttentionBackend, AttentionOptions, LayerShape
from server.engine.runtime.attention.latent import LatentHeads
from server.engine.runtime.attention.whole_images import ImageQueries, attend_again, image_queries, masked_attention
from server.engine.runtime.batch import Batch, Span


@dataclass(frozen=True)
class _Singles:
    """Keys of the batch's one-token sequences, for one window."""

    blocks: torch.Tensor
    """[sequences * blocks of the longest], padded with block 0."""
    mask: torch.Tensor | None
    """bool [sequences, 1, 1, keys]; None when every key counts."""
    keys: int


class SdpaBackend(AttentionBackend):
    """Key and value tensors [num_blocks, block_size, kv_heads, dim] per layer."""

    def __init__(
        self, shapes: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._block_size = block_size
        # Zeros, not empty: padding is read and multiplied by zero, which must not meet a NaN.
        sizes = [
            (num_blocks, block_size, shape.kv_heads, dim)
            for shape in shapes
            for dim in ([shape.key_dim] if shape.is_latent else [shape.key_dim, shape.value_dim])
        ]
        if device.type == "cpu":
            pages = HugePages()
            cache = iter([pages.zeros(size, dtype) for size in sizes])
        else:
            cache = iter([torch.zeros(size, dtype=dtype, device=device) for size in sizes])
        self._keys, self._values = [], []
        for shape in shapes:
            self._keys.append(next(cache))
            self._values.append(self._keys[-1][..., : shape.value_dim] if shape.is_latent else next(cache))
        self._flat_keys = [t.view(-1, *t.shape[2:]) for t in self._keys]
        # None: a latent layer's are part of its keys.
        self._flat_values = [
            None if shape.is_latent else t.view(-1, *t.shape[2:]) for shape, t in zip(shapes, self._values, strict=True)
        ]
        self._batch: Batch | None = None
        self._singles: dict[int | None, _Singles] = {}
        self._image_queries: Sequence[ImageQueries] = ()

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._singles = {}
        self._image_queries = image_queries(batch)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None
        self._flat_keys[layer].index_copy_(0, batch.slots, key)
        if (values := self._flat_values[layer]) is not None:
            values.index_copy_(0, batch.slots, value)
        singles = batch.num_single
        if singles == len(batch.spans) and not self._image_queries:
            return self._attend_singles(layer, query, options)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        if singles:
            out[:singles] = self._attend_singles(layer, query[:singles], options)
        for index in range(singles, len(batch.spans)):
            self._attend_span(layer, batch.spans[index], query, key, value, out, options)
        self._attend_again(layer, query, out, options)
        return out

    def attend_latent(
        self, layer: int, query: torch.Tensor, latent: torch.Tensor, heads: LatentHeads, options: AttentionOptions
    ) -> torch.Tensor:
        """See AttentionBackend. Chunks attend over expanded keys and values, as layers do whose heads have their own."""
        batch = self._batch
        assert batch is not None
        singles = batch.num_single
        if singles == len(batch.spans) or self._image_queries:
            return super().attend_latent(layer, query, latent, heads, options)
        self._flat_keys[layer].index_copy_(0, batch.slots, latent)
        out = query.new_empty(*query.shape[:2], heads.sizes.width)
        if singles:
            sums = self._attend_singles(layer, heads.absorbed(query[:singles]), options)
            out[:singles] = heads.values_of(sums)
        for index in range(singles, len(batch.spans)):
            span = batch.spans[index]
            rows = slice(span.row, span.row + span.length)
            keys, values = heads.expanded(self._gather(layer, span)[0][:, 0] if span.start else latent[rows, 0])
            out[rows] = _attend_chunk(query[rows], keys, values, span, options, self._sinks(layer, options))
        return out

    def _attend_again(self, layer: int, query: torch.Tensor, out: torch.Tensor, options: AttentionOptions) -> None:
        """Overwrite the rows of out that see more than causal attention gives them."""
        if self._image_queries and not (self.windowed_images and options.window is None):
            keys, values, sinks = self._keys[layer], self._values[layer], self._sinks(layer, options)
            attend_again(self._image_queries, lambda blocks: (keys[blocks], values[blocks]), query, out, options, sinks)

    def _attend_span(
        self,
        layer: int,
        span: Span,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        """Fill out's rows of one sequence; the batch's keys and values are in the cache already."""
        rows = slice(span.row, span.row + span.length)
        keys, values = self._gather(layer, span) if span.start else (key[rows], value[rows])
        out[rows] = _attend_chunk(query[rows], keys, values, span, options, self._sinks(layer, options))

    def _attend_singles(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """All one-token sequences at once: query [S, heads, dim]."""
        singles = self._singles.get(options.window)
        if singles is None:
            singles = self._singles[options.window] = self._locate_singles(options.window)
        count, heads = query.shape[:2]
        keys = self._keys[layer].index_select(0, singles.blocks).view(count, -1, *self._keys[layer].shape[2:])
        values = self._values[layer].index_select(0, singles.blocks).view(count, -1, *self._values[layer].shape[2:])
        keys, values = keys[:, : singles.keys].transpose(1, 2), values[:, : singles.keys].transpose(1, 2)
        # The query heads that share a key head are rows of one small matrix, so keys need not be repeated.
        grouped = query.reshape(count, keys.shape[1], heads // keys.shape[1], query.shape[2])
        sinks = self._sinks(layer, options)
        if sinks is not None:
            sinks = sinks.view(keys.shape[1], -1)  # the heads that share a key head are queries here
        out = masked_attention(grouped, keys, values, singles.mask, options, sinks)
        return out.reshape(count, heads, -1)

    def _sinks(self, layer: int, options: AttentionOptions) -> torch.Tensor | None:
        """The layer's sinks [heads, 1], if it has some."""
        return self.sinks[layer].unsqueeze(-1) if options.sinks else None

    def _locate_singles(self, window: int | None) -> _Singles:
        assert self._batch is not None
        spans, size = self._batch.spans, self._block_size
        lengths = spans.ends[: self._batch.num_single].tolist()
        firsts = [0 if window is None else max(0, length - window) // size for length in lengths]
        tables = [spans.blocks_of(index)[first:].tolist() for index, first in enumerate(firsts)]
        ends = [length - first * size for length, first in zip(lengths, firsts, strict=True)]
        begins = [0 if window is None else max(0, end - window) for end in ends]
        longest = max(len(table) for table in tables)
        device = self._batch.ids.device
        blocks = torch.tensor([b for table in tables for b in table + [0] * (longest - len(table))], device=device)
        keys = max(ends)
        if min(ends) == keys and max(begins) == 0:
            return _Singles(blocks, None, keys)
        place = torch.arange(keys, device=device)
        limits = torch.tensor([begins, ends], device=device).unsqueeze(-1)
        mask = (place >= limits[0]) & (place < limits[1])
        return _Singles(blocks, mask[:, None, None, :], keys)

    def _gather(self, layer: int, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [end, kv_heads, dim] of one sequence."""
        blocks = torch.tensor(list(span.blocks), device=self._keys[layer].device)
        keys = self._keys[layer].index_select(0, blocks).flatten(0, 1)
        values = self._values[layer].index_select(0, blocks).flatten(0, 1)
        return keys[: span.end], values[: span.end]


def _attend_chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: Span,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One sequence's chunk: query [length, heads, dim], keys [end, kv_heads, dim], sinks [heads, 1]."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    query = query.transpose(0, 1).unsqueeze(0)
    keys, values = (t.transpose(0, 1).repeat_interleave(heads // kv_heads, 0).unsqueeze(0) for t in (keys, values))
    windowed = options.window is not None and span.end > options.window
    if span.start == 0 and not windowed and options.softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=options.scaling)
        return out[0].transpose(0, 1)
    rows = torch.arange(span.start, span.end, device=query.device).unsqueeze(1)
    columns = torch.arange(span.end, device=query.device)
    mask = columns <= rows
    if options.window is not None:
        mask &= columns > rows - options.window
    return masked_attention(query, keys, values, mask, options, sinks)[0].transpose(0, 1)
