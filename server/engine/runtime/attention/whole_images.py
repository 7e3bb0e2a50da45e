"""Attention of images' tokens that see one another in both directions (Gemma 3 and 4), in plain torch on any device.

Kernels attend causally. For the few rows that see more, attention is computed again here, over the same cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.batch import Batch, to_device

Gather = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From KV blocks int64 [n] to their keys [n, block size, kv_heads, dim] and their values."""


@dataclass(frozen=True)
class ImageQueries:
    """Rows of a batch, all of one sequence, that see more of their images than causal attention gives them."""

    rows: torch.Tensor
    """int64 [n]."""
    places: torch.Tensor
    """int64 [n, 1]: each row's own place in the sequence."""
    first: torch.Tensor
    """int64 [n, 1]: the place from which on each row sees its image, whatever the window."""
    last: torch.Tensor
    """int64 [n, 1]: the place of the last token that each row sees."""
    blocks: torch.Tensor
    """int64: the sequence's KV blocks."""
    end: int
    """Tokens of the sequence that are in these."""


def image_queries(batch: Batch) -> Sequence[ImageQueries]:
    """The rows of a batch that see more than causal attention gives them."""
    if batch.images is None or batch.images.seen is None:
        return ()
    found, device = [], batch.ids.device
    for span in batch.spans:
        places = np.arange(span.start, span.end)
        first, last = batch.images.seen[:, span.row : span.row + span.length]
        more = np.flatnonzero((last > places) | (first < places))
        if len(more):
            rows, own, begin, end, blocks = (
                to_device(numbers, device)
                for numbers in (
                    more + span.row, places[more, None], first[more, None], last[more, None], np.array(span.blocks, np.int64)
                )
            )  # fmt: skip
            found.append(ImageQueries(rows, own, begin, end, blocks, span.end))
    return found


def attend_again(
    queries: Sequence[ImageQueries],
    gather: Gather,
    query: torch.Tensor,
    out: torch.Tensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> None:
    """Overwrite the queries' rows of out [T, heads, dim]; query [T, heads, dim], sinks [heads, 1].

    The batch's keys and values must be in the cache. Query i sees key j if j <= last[i] and, with a window,
    j > i - window or j >= first[i].
    """
    for each in queries:
        keys, values = (t.flatten(0, 1)[: each.end].transpose(0, 1) for t in gather(each.blocks))
        columns = torch.arange(each.end, device=query.device)
        mask = columns <= each.last
        if options.window is not None:
            mask &= (columns > each.places - options.window) | (columns >= each.first)
        heads = query.shape[1] // keys.shape[0]
        keys, values = (t.repeat_interleave(heads, 0).unsqueeze(0) for t in (keys, values))
        own = query[each.rows].transpose(0, 1).unsqueeze(0)
        out[each.rows] = masked_attention(own, keys, values, mask, options, sinks)[0].transpose(0, 1)


def masked_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(cap(query keys^T * scaling)) values, with mask False where a key does not count.

    sinks: scores of one more key of zeros, [heads, queries or 1] for a query [any, heads, queries, dim].
    """
    if options.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=options.scaling)
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.unsqueeze(-1).expand(*scores.shape[:-1], 1)), -1)
        return torch.matmul(scores.softmax(-1)[..., :-1].to(values.dtype), values)
    return torch.matmul(scores.softmax(-1).to(values.dtype), values)
