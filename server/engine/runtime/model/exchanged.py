"""Layers of a shard that need the other shards: projections split along k, norms, the embedding, the output layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.sharding.shards import Part, Shard
from server.engine.runtime import exchange
from server.engine.runtime.model.exchanged_experts import exchange_experts


class ReducedLinear(nn.Module):
    """A projection of which each rank has a part of k: the ranks' results are added up."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        """This rank's part, with its adapters if it has any: their results are partial sums, too."""
        self.in_features: int = linear.in_features  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., this rank's part of k] to [..., n]."""
        return exchange.all_reduce(self.linear(x))


class ReducedNorm(nn.Module):
    """A norm over all heads, x / sqrt(mean(x^2) + eps) * weight, of which each rank has the same number."""

    # One launch sums multiples of 16 bytes.
    SUMS = 4

    def __init__(self, norm: nn.Module, count: int) -> None:
        super().__init__()
        self.weight: torch.Tensor = norm.weight  # type: ignore[assignment]
        self.eps: float = norm.variance_epsilon  # type: ignore[assignment]
        self.features = self.weight.shape[0] * count
        """Of all ranks. Those that several ranks have, with the same key head, count as often in the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., this rank's features] to the same shape and dtype, rounded before the weight and after it."""
        wide = x.float()
        sums = wide.pow(2).unflatten(-1, (self.SUMS, -1)).sum(-1)
        exchange.all_reduce(sums)
        mean = sums.sum(-1, keepdim=True) / self.features
        return self.weight * (wide * torch.rsqrt(mean + self.eps)).to(x.dtype)


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank has some rows; a token's row comes from the rank that has it."""

    def __init__(self, embedding: nn.Module, first: int, count: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.first = first
        self.count = count

    @property
    def weight(self) -> torch.Tensor:
        """This rank's rows; some models' code asks them for their device."""
        weight: torch.Tensor = self.embedding.weight  # type: ignore[assignment]
        return weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [...] to [..., hidden]."""
        own = ids - self.first
        others = (own < 0) | (own >= self.count)
        found: torch.Tensor = self.embedding(own.masked_fill(others, 0))
        return exchange.all_reduce(found.masked_fill(others.unsqueeze(-1), 0))


class VocabularyLinear(nn.Module):
    """An output layer of which each rank has some rows: every rank gets all logits."""

    def __init__(self, linear: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.linear = linear
        self.vocabulary = vocabulary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden] to [..., vocabulary], the same bits on every rank."""
        parts = exchange.all_gather(self.linear(x)).unbind(0)
        # The last ranks' rows beyond the vocabulary are padding.
        each = parts[0].shape[-1]
        held = (self.vocabulary - rank * each for rank in range(len(parts)))
        return torch.cat([part[..., :size] for part, size in zip(parts, held, strict=True) if size > 0], -1)


def exchange_outputs(
    model: PreTrainedModel, parts: Mapping[str, Part], shard: Shard, norms: Sequence[str] = ()
) -> None:
    """Make a shard's layers exchange what they lack. Its projections must be in their final form, adapters included.

    norms: the names of norms over all heads.
    """
    partial = [name for name, part in parts.items() if part.is_partial]
    summed = exchange_experts(model, partial)
    for name in partial:
        if name not in summed:
            model.set_submodule(name, ReducedLinear(model.get_submodule(name)))
    for name in norms:
        model.set_submodule(name, ReducedNorm(model.get_submodule(name), shard.count))
    # An embedding may have more rows than there are tokens to sample (Mllama).
    embedding = model.get_input_embeddings()
    rows = embedding.weight.shape[0]
    model.set_input_embeddings(VocabularyEmbedding(embedding, shard.rank * rows, rows))
    model.set_output_embeddings(
        VocabularyLinear(model.get_output_embeddings(), model.config.get_text_config().vocab_size)
    )
