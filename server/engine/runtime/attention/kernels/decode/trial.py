"""Preparation of the decode kernel before graphs are captured: it is compiled, and compared with another backend."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch

from server.engine.runtime.attention.base import AttentionBackend
from server.engine.runtime.attention.graph_backend import DecodeForm
from server.engine.runtime.attention.kernels.decode.attention import TRIAL_SEQUENCES, DecodeAttention
from server.engine.runtime.attention.kernels.decode.key_parts import SMALLEST_PART
from server.engine.runtime.attention.kernels.kv_cache import Kind, LayerCache
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.trials import relative_error, side_by_side

# How far a step's outputs may differ from other kernels', as a share of their norm: rounding alone stays below.
_TOLERANCE = 0.02


Tried = tuple[torch.Tensor, Kind, torch.Tensor | None]
"""A layer's cache in 16 bits, LayerCache.data, its kind, and its sinks."""


def compile_forms(decode: DecodeAttention, layers: Sequence[Tried], forms: Collection[DecodeForm]) -> None:
    """Compile the kernel for each of the layers' kinds in all forms, and without a rotary embedding, side by side.

    Each is run once, on padding. Raises what a launch raises.
    """
    decode.plan(Spans.of([]), TRIAL_SEQUENCES)

    def launch(layer: Tried, form: DecodeForm) -> None:
        cache, kind, sinks = layer
        query = cache.new_zeros(TRIAL_SEQUENCES, kind.heads, kind.dim)
        key = value = cache.new_zeros(TRIAL_SEQUENCES, kind.kv_heads, kind.dim)
        rotary = _any_rotary(query[:, 0], form.norms) if form.rotary else None
        decode.attend(LayerCache(cache, None), query, key, value, kind.options, rotary, form.tile, sinks)

    wanted = {DecodeForm(False, False, 0), *forms}
    # Tiles are 256 elements wide, and no other result is tiled.
    launches = [
        partial(launch, layer, form)
        for layer in layers
        for form in wanted
        if (not form.tile or layer[1].heads * layer[1].dim % 256 == 0) and not (form.rotary and layer[1].is_latent)
    ]
    side_by_side(launches, layers[0][0].device)


def disagreement(
    decode: DecodeAttention,
    reference: AttentionBackend,
    cache: torch.Tensor,
    layer: int,
    kind: Kind,
    norms: bool = True,
) -> str | None:
    """Say how decode's outputs differ from the reference's by more than rounding; None where they do not.

    Tries each form of the kernel, a step without a rotary embedding and one with it, and with norms where norms says so.
    cache is reference's LayerCache.data for the layer, which is left filled with zeros; its last block is not used.
    """
    spans, slots = _steps(cache)
    # As chunks of one token each, which another kernel takes.
    reference.begin(Batch(slots, slots, slots, slots, spans, 0))
    for form in decode.forms(kind):
        with decode.in_form(form):
            decode.plan(spans, len(spans))
            rotaries = [None] if kind.is_latent else [None, _any_rotary(cache.new_empty(len(spans), kind.dim), norms)]
            for rotary in rotaries:
                wrong = _disagreement_in(decode, reference, cache, layer, kind, spans, slots, rotary)
                if wrong is not None:
                    return wrong if form is None else f"{wrong} ({form})"
    return None


def _steps(cache: torch.Tensor) -> tuple[Spans, torch.Tensor]:
    """Decode steps of a few sequences in the first blocks of cache, and the slots of their tokens."""
    block_size, room = cache.shape[2], cache.shape[0] - 1
    made: list[Span] = []
    used = 0
    for length in (1, block_size + 1, 2 * SMALLEST_PART + 3):
        own = range(used, min(used + -(-length // block_size), room))
        if own:
            end = min(length, len(own) * block_size)
            made.append(Span(len(made), end - 1, 1, own))
            used = own.stop
    slots = [span.blocks[-1] * block_size + span.start % block_size for span in made]
    return Spans.of(made), torch.tensor(slots, device=cache.device)


def _disagreement_in(
    decode: DecodeAttention,
    reference: AttentionBackend,
    cache: torch.Tensor,
    layer: int,
    kind: Kind,
    spans: Spans,
    slots: torch.Tensor,
    rotary: RotaryEmbedding | None,
) -> str | None:
    """disagreement() of one step, which both have been told of."""

    def made(heads: int) -> torch.Tensor:
        return torch.randn(len(spans), heads, kind.dim, dtype=cache.dtype, device=cache.device)

    query, key, value = made(kind.heads), made(kind.kv_heads), made(kind.kv_heads)
    if kind.is_latent:
        value = key[..., : kind.value_dim]
    used = int(spans.counts.sum())
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
    if (
        not torch.equal(written[:, -1, :, : value.shape[2]], value)
        or not relative_error(written[:, 0], key) <= rounding
    ):
        return "other keys and values are in the cache"
    error = relative_error(found, expected)
    return None if error < _TOLERANCE else f"outputs are off by {error:.1e}"


def _any_rotary(like: torch.Tensor, norms: bool) -> RotaryEmbedding:
    """A rotary embedding by random angles, with norms or without, for T tokens, in the dtype of like [T, dim]."""
    tokens, dim = like.shape
    angles = torch.randn(tokens, dim // 2, device=like.device).repeat(1, 2)
    cos, sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    if not norms:
        return RotaryEmbedding(cos, sin)
    return RotaryEmbedding(cos, sin, (torch.randn_like(like[0]), torch.randn_like(like[0])), eps=1e-6, offset=1.0)
