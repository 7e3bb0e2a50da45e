"""Latent attention of a decoder layer, whose cache keeps latents."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn

from server.engine.runtime.attention.base import AttentionOptions
from server.engine.runtime.attention.calls import LATENT_HEADS, active_backend
from server.engine.runtime.attention.graph_backend import DecodeForm
from server.engine.runtime.attention.latent import LatentHeads
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.layers.norm import Norm, read_norm
from server.engine.runtime.layers.projection import Projection, projection_of

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LatentAttention:
    """Queries, one latent and one rotary key from one input, attention over the paged cache, output."""

    layer: int
    """Its place among the layers that attend."""
    heads: LatentHeads
    down: tuple[Projection, Norm] | None
    """The projection to what queries are made of, and the norm of that; None: queries are made of the input."""
    query: Projection
    latent: Projection
    """To a latent and the rotary columns of a key."""
    latent_norm: Norm
    output: Projection
    options: AttentionOptions
    angle_step: int
    """Of RotaryEmbedding."""

    def __call__(
        self, x: torch.Tensor, norm: Norm | None, angles: Angles | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """residual + the output for norm(x), x [T, width]."""
        sizes = self.heads.sizes
        y = x if norm is None else norm(x)
        query = self.query(y) if self.down is None else self.query(self.down[0](y), self.down[1])
        query = query.unflatten(-1, (sizes.heads, -1))
        plain, key = self.latent(y).split([sizes.rank, query.shape[2] - sizes.plain], -1)
        turned, key = query[..., sizes.plain :], key.unsqueeze(1)
        if angles is not None:
            turned, key = RotaryEmbedding(*angles, angle_step=self.angle_step).rotate(turned, key)
            query = torch.cat((query[..., : sizes.plain], turned), -1)
        latent = torch.cat((self.latent_norm(plain.contiguous()).unsqueeze(1), key), -1)
        out = active_backend().attend_latent(self.layer, query, latent, self.heads, self.options)
        return self.output(out.flatten(1), residual=residual)

    def form(self, sequences: int, dtype: torch.dtype) -> DecodeForm:
        """What it asks of the launch that attends in a decode graph, of which there are none."""
        return DecodeForm(False, False, 0)


def read_latent_attention(module: nn.Module, index: int, options: AttentionOptions) -> LatentAttention:
    """The latent attention that a module with LATENT_HEADS computes. Raises ValueError, which says what it has.

    index, options: as read_layer() has them.
    """
    heads: LatentHeads = getattr(module, LATENT_HEADS)
    config = getattr(module, "config", None)
    if "llama_4_scaling_beta" in (getattr(config, "rope_parameters", None) or {}):
        raise ValueError("scales queries by their place")
    # A function that takes complex angles rotates neighbours, too.
    is_complex = hasattr(sys.modules[type(module).__module__], "apply_rotary_emb")
    children = dict(module.named_children())
    down = None
    names = {"q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    if "q_a_proj" in children:
        names = names - {"q_proj"} | {"q_a_proj", "q_a_layernorm", "q_b_proj"}
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if set(children) != names or own:
        raise ValueError(f"has {', '.join([*children, *own])}")
    if "q_a_proj" in children:
        down = projection_of(children["q_a_proj"]), read_norm(children["q_a_layernorm"])
    return LatentAttention(
        index,
        heads,
        down,
        projection_of(children["q_proj" if down is None else "q_b_proj"]),
        projection_of(children["kv_a_proj_with_mqa"]),
        read_norm(children["kv_a_layernorm"]),
        projection_of(children["o_proj"]),
        options,
        angle_step=1 if getattr(config, "rope_interleave", False) or is_complex else 0,
    )
