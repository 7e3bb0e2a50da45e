"""An embedding whose table stays in host memory, which saves a GPU's: a step reads a row for each token."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.base import CheckpointError


class HostEmbedding(nn.Module):
    """The rows of a table on the CPU.

    The table is neither parameter nor buffer, so that the model's device is that of its other weights.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight
        """[tokens, hidden] on the CPU."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [...] to [..., hidden]."""
        return self.weight[ids]


def check_movable(folder: Path, model: PreTrainedModel) -> nn.Embedding:
    """The model's embedding. Raises CheckpointError for one that is the output layer, too, or no plain embedding."""
    embedding = model.get_input_embeddings()
    if model.config.get_text_config().tie_word_embeddings:
        raise CheckpointError(
            f"{folder}: engine.embedding_device is cpu, but the embedding is the output layer, which every step reads whole"
        )
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        raise CheckpointError(
            f"{folder}: engine.embedding_device is cpu, which does not work with a {type(embedding).__name__}"
        )
    return embedding


def move_embedding(folder: Path, model: PreTrainedModel) -> None:
    """Put a model's embedding into host memory. Raises CheckpointError as check_movable() does."""
    model.set_input_embeddings(HostEmbedding(check_movable(folder, model).weight.data.cpu()))
