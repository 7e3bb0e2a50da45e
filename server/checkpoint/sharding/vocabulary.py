"""Embeddings and output layers of a shard, which has some rows of them."""

from __future__ import annotations

from pathlib import Path

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.embedding import MODULES
from server.checkpoint.sharding.shards import Shard


def set_vocabulary(layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Make an embedding or an output layer one of the shard's rows: weight [rows, hidden]."""
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if isinstance(layer, nn.Embedding):
        layer.num_embeddings, layer.padding_idx = weight.shape[0], None
    else:
        layer.out_features = weight.shape[0]  # type: ignore[assignment]
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)


def shares_embedding(model: PreTrainedModel, folder: Path) -> bool:
    """Whether the embedding's weight is the output layer's, too, unless the files in folder have another one there.

    That is so by the configuration, or because an embedding model needs no output layer.
    """
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), None)
    return f"{name}.weight" in model.get_expanded_tied_weights_keys(all_submodels=True) or (folder / MODULES).exists()


def vocabulary_rows(
    whole: torch.Tensor, state: QuantState | None, shard: Shard, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The shard's rows of a tensor [vocabulary, ...] in dtype on device, with zeros beyond the vocabulary's end.

    state: how the tensor is quantized, if it is; then it is expanded.
    """
    if state is not None:
        whole = dequantize_4bit(whole, state)
    rows = shard.rows_of(whole.shape[0])
    own = torch.zeros((len(rows), *whole.shape[1:]), dtype=dtype, device=device)
    held = whole[rows.start : rows.stop]
    own[: held.shape[0]] = held.to(device)
    return own
