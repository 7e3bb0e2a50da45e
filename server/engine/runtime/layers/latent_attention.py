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
from server.engine.runtime.layers.norm import Norm, RmsNorm, read_norm
from server.engine.runtime.layers.projection import JoinedProjection, Projection, joined, projection_of

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LatentAttention:
    """Queries, one latent and one rotary key from one input, attention over the paged cache, output."""

    layer: int
    """Its place among the layers that attend."""
    heads: LatentHeads
    inputs: JoinedProjection
    """To queries or what they are made of, and to a latent with the rotary columns of a key."""
    query: tuple[Norm, Projection] | None
    """Projection that makes queries of the first; None: it has them."""
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
        query, latent = self.inputs(x, norm)
        if self.query is not None:
            query = self.query[1](query, self.query[0])
        query, latent = self._normalised_and_rotated(query.unflatten(-1, (sizes.heads, -1)), latent, angles)
        out = active_backend().attend_latent(self.layer, query, latent, self.heads, self.options)
        return self.output(out.flatten(1), residual=residual)

    def _normalised_and_rotated(
        self, query: torch.Tensor, latent: torch.Tensor, angles: Angles | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query [T, heads, plain + rotary] rotated, latents [T, 1, rank + rotary] normalised and rotated."""
        sizes, norm = self.heads.sizes, self.latent_norm
        columns = query.shape[2] - sizes.plain
        rotary = None if angles is None else RotaryEmbedding(*angles, angle_step=self.angle_step)
        whole = rotary is not None and rotary.cos.shape[-1] == columns and columns & (columns - 1) == 0
        if query.is_cuda and isinstance(norm, RmsNorm) and rotary is not None and whole:
            # Triton is not installed without CUDA.
            from server.engine.runtime.layers.latent_kernels import normalise_and_rotate

            return query, normalise_and_rotate(query, latent, norm.weight, norm.eps, norm.offset, rotary)
        plain, key = latent.split([sizes.rank, columns], -1)
        turned, key = query[..., sizes.plain :], key.unsqueeze(1)
        if rotary is not None:
            turned, key = rotary.rotate(turned, key)
            query = torch.cat((query[..., : sizes.plain], turned), -1)
        return query, torch.cat((norm(plain.contiguous()).unsqueeze(1), key), -1)

    def form(self, sequences: int, dtype: torch.dtype) -> DecodeForm:
        """Form that it asks of the launch that attends in a decode graph, of which there are none."""
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
    first, query = "q_proj", None
    names = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
    if "q_a_proj" in children:
        first = "q_a_proj"
        names |= {"q_a_layernorm", "q_b_proj"}
    names.add(first)
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if set(children) != names or own:
        raise ValueError(f"has {', '.join([*children, *own])}")
    if first == "q_a_proj":
        query = read_norm(children["q_a_layernorm"]), projection_of(children["q_b_proj"])
    return LatentAttention(
        index,
        heads,
        joined([children[first], children["kv_a_proj_with_mqa"]]),
        query,
        read_norm(children["kv_a_layernorm"]),
        projection_of(children["o_proj"]),
        options,
        angle_step=1 if getattr(config, "rope_interleave", False) or is_complex else 0,
    )
