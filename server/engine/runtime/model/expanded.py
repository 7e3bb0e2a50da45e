"""16-bit copies of NF4 weights, for steps with enough tokens that cuBLAS is faster than the NF4 kernels."""

from __future__ import annotations

import logging

import torch
from torch import nn
from transformers import PreTrainedModel

from server.engine.runtime.model.decoder import decoder_layers
from server.engine.runtime.model.projections import NF4Linear

logger = logging.getLogger(__name__)

# Where the configuration says auto, copies take at most this share of the memory that the weights leave free. The KV cache
# and a step get the rest.
AUTO_SHARE = 0.25
# The same where the configuration says how large the KV cache is: what that takes is not counted, and steps get the rest.
AUTO_SHARE_BESIDE_CACHE = 0.5


def expand_weights(model: PreTrainedModel, budget: int) -> int:
    """Give the NF4 layers of model's first decoder layers 16-bit copies of up to budget bytes in all; returns their bytes.

    A decoder layer gets the copies of all its NF4 layers or none, so that at most two kinds of decoder layers have to be
    compiled. Call before the model is compiled.
    """
    taken = expanded = 0
    layers = decoder_layers(model)
    for layer in layers:
        linears = [module for module in layer.modules() if isinstance(module, NF4Linear)]
        size = sum(copy_bytes(linear, model.dtype) for linear in linears)
        if taken + size > budget:
            break
        for linear in linears:
            linear.expand(model.dtype)
        taken, expanded = taken + size, expanded + bool(linears)
    if expanded:
        logger.info(
            "weights of %d of %d decoder layers also in %s, %.2f GiB: steps of %d tokens and more use them",
            expanded,
            len(layers),
            str(model.dtype).removeprefix("torch."),
            taken / 2**30,
            NF4Linear.EXPANDED_FROM,
        )
    return taken


def copy_bytes(linear: NF4Linear, dtype: torch.dtype) -> int:
    """Bytes of one layer's copy."""
    return linear.out_features * linear.in_features * dtype.itemsize


def expanded_bytes(model: nn.Module) -> int:
    """Bytes of all copies that a model has."""
    linears = (module for module in model.modules() if isinstance(module, NF4Linear))
    return sum(linear.expanded.nbytes for linear in linears if linear.expanded is not None)
