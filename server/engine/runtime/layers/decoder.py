"""A decoder layer as the launches that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from server.engine.runtime.layers.attention import Angles, Attention
from server.engine.runtime.layers.experts import Experts
from server.engine.runtime.layers.latent_attention import LatentAttention
from server.engine.runtime.layers.mlp import GatedMlp, Mlp
from server.engine.runtime.layers.norm import Norm
from server.engine.runtime.layers.parallel_experts import ParallelExperts
from server.engine.runtime.layers.stateful.state_layers import StateMixer


@dataclass(frozen=True)
class ParallelMixers:
    """Attention and a mixer with a state over one input, whose results are multiplied and added up (Falcon-H1)."""

    attention: Attention
    state: StateMixer
    input_multiplier: float
    """Of the attention's input."""
    multipliers: tuple[float, float]
    """Of the attention's result and of the other one's."""

    def __call__(
        self, x: torch.Tensor, norm: Norm | None, angles: Angles | None, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """residual + the sum for norm(x), x [T, width]."""
        x = x if norm is None else norm(x)
        attended, advanced = self.multipliers
        y = self.state(x, None, angles, None) * advanced
        y += self.attention(x * self.input_multiplier, None, angles, None) * attended
        return y if residual is None else residual + y


Mixer = Attention | LatentAttention | StateMixer | ParallelMixers
"""Mixer of a sequence's tokens. Called with x, the norm of x, rotary angles and the residual that it adds."""
FeedForward = GatedMlp | Mlp | Experts | ParallelExperts


@dataclass(frozen=True)
class Block:
    """x + multiplier * after(part(before(x))): a part of a layer with its norms and its residual."""

    before: Norm | None
    after: Norm | None
    multiplier: float

    @property
    def is_plain(self) -> bool:
        """Whether the part's last GEMM adds the residual."""
        return self.after is None and self.multiplier == 1.0

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x + multiplier * after(y)."""
        if self.after is not None and self.multiplier == 1.0:
            return self.after(y, x)
        return torch.add(x, y if self.after is None else self.after(y), alpha=self.multiplier)


@dataclass(frozen=True)
class DecoderLayer:
    """A mixer and then a feed-forward part, each with norms before it, after it or both; or one of these alone."""

    mixer: Mixer | None
    mixer_block: Block
    mlp: FeedForward | None
    mlp_block: Block
    is_parallel: bool = False
    """Whether both parts have the norm in front of the mixer as their input, and no other norms (Cohere, Phi)."""
    scale: torch.Tensor | None = None
    """[1]: what the result is multiplied by (Gemma 4)."""

    def __call__(
        self, hidden_states: torch.Tensor, *_: Any, position_embeddings: Angles | torch.Tensor | None = None, **__: Any
    ) -> torch.Tensor:
        """Hidden states [1, T, width] to the same shape, as transformers' layer is called. Overwrites its input.

        position_embeddings: cos and sin [1, T, columns], or complex [1, T, columns / 2].
        """
        x = hidden_states.view(-1, hidden_states.shape[-1])
        angles = None
        if position_embeddings is not None:
            if isinstance(position_embeddings, torch.Tensor):
                # DeepSeek V2's are complex numbers, one for each pair of elements.
                position_embeddings = position_embeddings.real.repeat(1, 1, 2), position_embeddings.imag.repeat(1, 1, 2)
            cos, sin = position_embeddings
            angles = cos.view(-1, cos.shape[-1]), sin.view(-1, sin.shape[-1])
        block, mixer, mlp = self.mixer_block, self.mixer, self.mlp
        if self.is_parallel and block.before is not None and mixer is not None and mlp is not None:
            y = block.before(x)
            return mlp(y, None, mixer(y, None, angles, x)).view(hidden_states.shape)
        if mixer is not None and block.is_plain:
            x = mixer(x, block.before, angles, x)
        elif mixer is not None:
            x = block.add(x, mixer(x, block.before, angles, None))
        block = self.mlp_block
        if mlp is not None:
            x = mlp(x, block.before, x) if block.is_plain else block.add(x, mlp(x, block.before, None))
        return (x if self.scale is None else x * self.scale).view(hidden_states.shape)

    @property
    def attention(self) -> Attention | None:
        """The part of it that attends."""
        if isinstance(self.mixer, ParallelMixers):
            return self.mixer.attention
        return self.mixer if isinstance(self.mixer, Attention) else None
