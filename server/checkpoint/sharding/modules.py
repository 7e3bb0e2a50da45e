"""Changes to the modules of a shard that is on the meta device: its vocabulary's rows, and memory for its buffers."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.sharding.multimodal import initializing_model


def set_vocabulary(layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Make an embedding or an output layer one of the shard's rows: weight [rows, hidden]."""
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if isinstance(layer, nn.Embedding):
        layer.num_embeddings, layer.padding_idx = weight.shape[0], None
    else:
        layer.out_features = weight.shape[0]  # type: ignore[assignment]
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)


def initialize_buffers(model: PreTrainedModel, module: nn.Module, device: torch.device) -> None:
    """Give a module of a model on the meta device memory, and its buffers (rotary frequencies) their values."""
    module.to_empty(device=device, recurse=False)
    initializing_model(model, module)._init_weights(module)
