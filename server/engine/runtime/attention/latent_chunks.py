"""Long chunks of latent attention, which attend over keys and values that are expanded for the step.

That takes half the operations of the absorbed form, or fewer, once a chunk has many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.latent import LatentHeads
from server.engine.runtime.batch import Spans

_MIN_TOKENS = 256
"""Fewer do not pay for their launches."""


@dataclass(frozen=True)
class LongChunk:
    """A chunk of a step, and where its sequence's latents are."""

    rows: slice
    """Of the step's tokens."""
    blocks: torch.Tensor | None
    """int32, the sequence's KV blocks; None: the chunk is all of the sequence so far."""
    end: int
    """Tokens of the sequence, those of the chunk included."""

    def attend(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        cache: torch.Tensor,
        heads: LatentHeads,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        """Write the chunk's attention into its rows of out [T, heads, width].

        query, latent: the step's, as of AttentionBackend.attend_latent(). cache: LayerCache.data, which has them already.
        """
        known = latent[self.rows, 0]
        if self.blocks is not None:
            known = cache[self.blocks].flatten(0, 3)[: self.end]
        keys, values = (x.transpose(0, 1).unsqueeze(0) for x in heads.expanded(known))
        own = query[self.rows].transpose(0, 1).unsqueeze(0)
        width = values.shape[-1]
        # torch's fast kernels take keys and values of one width.
        values = F.pad(values, (0, keys.shape[-1] - width))
        mask = causal_lower_right(own.shape[2], self.end)
        found = F.scaled_dot_product_attention(own, keys, values, mask, scale=options.scaling)
        out[self.rows] = found[0, :, :, :width].transpose(0, 1)


def long_chunks(spans: Spans, singles: int, heads: LatentHeads, tables: torch.Tensor) -> dict[int, LongChunk]:
    """Those of the spans after the first `singles` that attend over expanded keys and values, by their place.

    tables: DeviceTables.blocks, which the spans' rows name.
    """
    found = {}
    for place in range(singles, len(spans)):
        span = spans[place]
        if span.length >= _MIN_TOKENS and heads.expands(span.length, span.end):
            blocks = tables[spans.rows[place], : len(span.blocks)] if span.start else None
            found[place] = LongChunk(slice(span.row, span.row + span.length), blocks, span.end)
    return found
