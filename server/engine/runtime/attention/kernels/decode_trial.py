"""Trial steps of the decode kernel beside another backend, before graphs are captured with it."""

from __future__ import annotations

import torch

from server.engine.runtime.attention.base import AttentionBackend
from server.engine.runtime.attention.kernels.decode import DecodeAttention
from server.engine.runtime.attention.kernels.key_parts import SMALLEST_PART
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.trials import relative_error

# How far a step's outputs may differ from other kernels', as a share of their norm: rounding alone stays below.
_TOLERANCE = 0.02


def disagreement(
    decode: DecodeAttention,
    reference: AttentionBackend,
    cache: torch.Tensor,
    layer: int,
    kind: Kind,
) -> str | None:
    """Say how decode's outputs differ from the reference's by more than rounding; None where they do not.

    Tries a step without a rotary embedding and one with it and norms. cache is reference's for the layer, [blocks, 2,
    block_size, kv_heads, dim], which is left filled with zeros; its last block is not used.
    """
    block_size, room = cache.shape[2], cache.shape[0] - 1
    made_spans: list[Span] = []
    used = 0
    for length in (1, block_size + 1, 2 * SMALLEST_PART + 3):
        own = range(used, min(used + -(-length // block_size), room))
        if own:
            end = min(length, len(own) * block_size)
            made_spans.append(Span(len(made_spans), end - 1, 1, own))
            used = own.stop
    spans = Spans.of(made_spans)

    def made(heads: int) -> torch.Tensor:
        return torch.randn(len(spans), heads, kind.dim, dtype=cache.dtype, device=cache.device)

    slots = torch.tensor([s.blocks[-1] * block_size + s.start % block_size for s in made_spans], device=cache.device)
    decode.plan(spans, len(spans))
    reference.begin(Batch(slots, slots, slots, slots, spans, len(spans)))
    for rotary in (None, _any_rotary(cache.new_empty(len(spans), kind.dim))):
        query, key, value = made(kind.heads), made(kind.kv_heads), made(kind.kv_heads)
        cache[:used].normal_()
        found = decode.attend(
            LayerCache(cache, None), query, key, value, kind.options, rotary, sinks=reference.sinks.get(layer)
        )
        written = cache.transpose(1, 2).flatten(0, 1)[slots]
        if rotary is not None:
            query, key = rotary.apply(query, key)
        expected = reference.attend(layer, query, key, value, kind.options)
        cache[:used].zero_()
        rounding = 0.0 if rotary is None else _TOLERANCE
        if not torch.equal(written[:, 1], value) or not relative_error(written[:, 0], key) <= rounding:
            return "other keys and values are in the cache"
        error = relative_error(found, expected)
        if not error < _TOLERANCE:
            return f"outputs are off by {error:.1e}"
    return None


def _any_rotary(like: torch.Tensor) -> RotaryEmbedding:
    """A rotary embedding by random angles, with norms, for T tokens, in the dtype of like [T, dim]."""
    tokens, dim = like.shape
    angles = torch.randn(tokens, dim // 2, device=like.device).repeat(1, 2)
    cos, sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    return RotaryEmbedding(cos, sin, (torch.randn_like(like[0]), torch.randn_like(like[0])), eps=1e-6, offset=1.0)
