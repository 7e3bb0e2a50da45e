"""The attention of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.calls import active_backend
from server.engine.runtime.attention.graph_backend import ROTARY_FROM, DecodeForm
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.layers.norm import Norm, RmsNorm
from server.engine.runtime.layers.projection import JoinedProjection, Projection

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin [T, columns], contiguous."""


@dataclass(frozen=True)
class Attention:
    """Queries, keys and values from one input, norms, rotary embedding, attention over the paged cache, output."""

    layer: int
    """Its place among the layers that attend."""
    head_dim: int
    qkv: JoinedProjection
    output: Projection
    options: AttentionOptions
    head_norms: tuple[RmsNorm, RmsNorm] | None = None
    """The norms of each head of the queries and of the keys, in front of the rotary embedding, if not norms_last."""
    norms_last: bool = False
    """Whether these norms come after the rotary embedding (HunYuan)."""
    value_norm: RmsNorm | None = None
    """The norm of each head of the values (Gemma 4)."""
    row_norms: tuple[Norm, Norm] | None = None
    """The norms of all heads of the queries together, and of the keys."""
    is_rotary: bool = True
    is_gated: bool = False
    """Whether a head of the queries' projection has a gate behind the query, whose sigmoid multiplies the head's result."""
    gate: Projection | None = None
    """The projection of such gates, if it is one of its own (Trinity)."""
    angles_once: bool = False
    """Whether the layer's own code takes each angle once, for both elements that it rotates (gpt-oss)."""
    angle_step: int = 0
    """Of RotaryEmbedding."""
    key_multiplier: float = 1.0
    """Factor of keys, applied before everything else (Falcon-H1)."""

    def __call__(
        self, x: torch.Tensor, norm: Norm | None, angles: Angles | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """residual + the output for norm(x), x [T, width]."""
        tokens = x.shape[0]
        if self.gate is not None and norm is not None:
            x, norm = norm(x), None
        query, key, *values = self.qkv(x, norm)
        if self.key_multiplier != 1.0:
            key = key * self.key_multiplier
        if self.row_norms is not None:
            query, key = self.row_norms[0](query), self.row_norms[1](key)
        gate = None if self.gate is None else self.gate(x).unflatten(-1, (-1, self.head_dim))
        if self.is_gated:
            query, gate = query.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        else:
            query = query.unflatten(-1, (-1, self.head_dim))
        # Without a projection of their own, values are what keys are before their norm and rotation.
        key, value = (rows.unflatten(-1, (-1, self.head_dim)) for rows in (key, values[0] if values else key))
        if self.value_norm is not None:
            value = _of_heads(self.value_norm, value)
        backend = active_backend()
        rotary = self._rotary(angles) if self.is_rotary and angles is not None else None
        if rotary is None or self.rotates_first:
            if rotary is not None:
                query, key = rotary.rotate(query, key)
            if (rotary is None or self.norms_last) and self.head_norms is not None:
                query, key = (_of_heads(norm, rows) for norm, rows in zip(self.head_norms, (query, key), strict=True))
            out = backend.attend(self.layer, query, key, value, self.options)
            return self.output(_gated(out, gate).flatten(1), residual=residual)
        tile = self.output.tile(tokens, x.dtype) if gate is None and self._tiles(tokens, rotary) else 0
        out = backend.attend_rotary(self.layer, query, key, value, self.options, rotary, tile)
        if tile:
            return self.output.of_tiles(out, tokens, residual)
        return self.output(_gated(out, gate).flatten(1), residual=residual)

    @property
    def has_gate(self) -> bool:
        """Whether gates multiply the heads' results."""
        return self.is_gated or self.gate is not None

    @property
    def rotates_first(self) -> bool:
        """Whether a launch of its own rotates, because the one that attends cannot."""
        return self.norms_last or self.angle_step > 0

    def form(self, sequences: int, dtype: torch.dtype) -> DecodeForm:
        """Form that it asks of the launch that attends in a decode graph of that many sequences."""
        if not self.is_rotary or self.rotates_first or sequences < ROTARY_FROM:
            return DecodeForm(False, False, 0)
        return DecodeForm(True, self.head_norms is not None, 0 if self.has_gate else self.output.tile(sequences, dtype))

    def _rotary(self, angles: Angles) -> RotaryEmbedding:
        if self.angles_once and 2 * angles[0].shape[-1] <= self.head_dim:
            angles = angles[0].repeat(1, 2), angles[1].repeat(1, 2)
        if self.head_norms is None or self.norms_last:
            return RotaryEmbedding(*angles, angle_step=self.angle_step)
        of_queries, of_keys = self.head_norms
        weights = of_queries.weight, of_keys.weight
        return RotaryEmbedding(*angles, weights, of_queries.eps, of_queries.offset, self.angle_step)

    def _tiles(self, tokens: int, rotary: RotaryEmbedding) -> bool:
        return rotary.cos.shape[-1] == self.head_dim and active_backend().tiles_result(tokens)


def _gated(out: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """out times the sigmoid of the gate, both [T, heads, dim]."""
    if gate is None:
        return out
    if not out.is_cuda:
        return out * torch.sigmoid(gate)
    # Triton is not installed without CUDA.
    from server.engine.runtime.layers.kernels import gate_heads

    return gate_heads(out, gate)


def _of_heads(norm: Norm, rows: torch.Tensor) -> torch.Tensor:
    """The norm of each head of rows [T, heads, dim]."""
    return norm(rows.reshape(-1, rows.shape[-1])).view(rows.shape)
