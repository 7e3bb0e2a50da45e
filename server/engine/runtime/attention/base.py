"""The interface of attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from nf4_kernels.reference import tile_activations, tiles_shape
from server.engine.runtime.attention.latent import LatentHeads
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.batch import Batch


class UnsupportedModelError(Exception):
    """The model's attention is not one that the engine can compute; the message is one line."""


@dataclass(frozen=True)
class LayerShape:
    """Keys and values of one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int
    heads: int = 1
    """The number of query heads; only backends that plan a step before they attend need it."""
    is_latent: bool = False
    """Whether values are the first value_dim columns of keys, which the cache keeps once (attention/latent.py)."""

    def bytes_per_token(self, itemsize: int) -> int:
        """Cache bytes that one token takes in this layer."""
        return self.kv_heads * (self.key_dim + (0 if self.is_latent else self.value_dim)) * itemsize


@dataclass(frozen=True)
class AttentionOptions:
    """Options of one layer's attention. Query i sees key j when j <= i and, with a window, j > i - window.

    softcap: scores become softcap * tanh(scores / softcap). sinks: each query head sees one more key, whose score is a
    number of that head and whose value is zero; the backend has the numbers (AttentionBackend.sinks).
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


class AttentionBackend(ABC):
    """Owns the cache of every layer and attends over it. One forward pass: begin(batch), then attend() per layer."""

    sinks: Mapping[int, torch.Tensor] = MappingProxyType({})
    """The sinks of the layers whose options say that they have some, by layer: each query head's, float32 [heads]."""
    windows: Mapping[int, int | None] = MappingProxyType({})
    """The windows that layers' masks would have had, by layer; a layer that is not here has the one it is called with."""

    windowed_images = False
    """Whether an image's tokens see one another in layers with a window only."""

    def load_long_chunks(self) -> None:  # noqa: B027 - most have none
        """Load what is faster for long chunks but takes long to load, while steps run. Call behind all captures."""

    @abstractmethod
    def begin(self, batch: Batch) -> None:
        """Prepare what all layers of the coming forward pass share."""

    @abstractmethod
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write the batch's keys and values into the layer's cache and attend.

        query [T, heads, key_dim], key [T, kv_heads, key_dim], value [T, kv_heads, value_dim] for the batch's T tokens,
        any strides with a contiguous last dimension; returns [T, heads, value_dim]. In a layer whose shape is latent, value
        is the first columns of key.
        """

    def attend_latent(
        self, layer: int, query: torch.Tensor, latent: torch.Tensor, heads: LatentHeads, options: AttentionOptions
    ) -> torch.Tensor:
        """Write the batch's latents into the layer's cache and attend.

        query [T, heads, key_dim] of full heads, latent [T, 1, rank + rotary]; returns full heads [T, heads, value_dim].
        """
        out = self.attend(layer, heads.absorbed(query), latent, latent[..., : heads.sizes.rank], options)
        return heads.values_of(out)

    def see_sinks(self, layer: int, sinks: torch.Tensor) -> None:  # noqa: B027 - most need not know
        """Called before attend() in a layer that has sinks, [heads]."""

    def see_mask(self, layer: int, module: str, mask: torch.Tensor) -> None:
        """Called before attend(), with the name of the layer's module, in a layer that is called with a mask."""
        raise UnsupportedModelError(f"{module} has a mask of its own, which the paged attention ignores")

    def attend_rotary(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        rotary: RotaryEmbedding,
        tile: int = 0,
    ) -> torch.Tensor:
        """Do as attend() does, for a query and a key that get their rotary embedding first.

        tile: where it is not 0, the result is [T, heads * dim] as tiled activations, see result_shape(); in the last tile,
        tokens beyond T may hold anything.
        """
        return _tiled(self.attend(layer, *rotary.rotate(query, key), value, options), tile)

    def tiles_result(self, tokens: int) -> bool:
        """Whether the launch of attend_rotary() writes tiled activations itself in the pass that has begun."""
        return False


def _tiled(out: torch.Tensor, tile: int) -> torch.Tensor:
    """A result [T, heads, dim] as it is, or with a tile as tiled activations."""
    if tile == 0:
        return out
    tokens, heads, dim = out.shape
    return tile_activations(out.flatten(1), tile).view(result_shape(tokens, heads, dim, tile))


def result_shape(tokens: int, heads: int, dim: int, tile: int) -> tuple[int, ...]:
    """[tokens, heads, dim], or with a tile the shape of nf4_kernels.reference.tile_activations([tokens, heads * dim], tile).

    Raises ValueError where tiles would need columns of padding, which attention kernels do not write.
    """
    if tile == 0:
        return tokens, heads, dim
    if heads * dim % 256 != 0:
        raise ValueError(f"heads * dim is {heads} * {dim}, and tiles need a multiple of 256")
    return tiles_shape(tokens, heads * dim, tile)
