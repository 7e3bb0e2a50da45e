"""16-bit copies of NF4 weights, for steps with enough tokens that cuBLAS is faster than the NF4 kernels."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from nf4_kernels import ops
from server.engine.runtime.model.decoder import decoder_layers
from server.engine.runtime.model.projections import NF4Linear

logger = logging.getLogger(__name__)

# Where the configuration says auto, copies take at most this share of the memory that the weights leave free. The KV cache
# and a step get the rest.
AUTO_SHARE = 0.25
# The same where the configuration says how large the KV cache is: what that takes is not counted, and steps get the rest.
AUTO_SHARE_BESIDE_CACHE = 0.5

# Steps of up to LARGE_UP_TO tokens multiply by the codes all the same where a layer has a weight of LARGE elements
# or more. cuBLAS's GEMMs of such weights run at the GPU's limit of power, and the NF4 launches compute norm, activation and
# sum as well. With a largest weight of 142M elements this was 4 % faster at 136 tokens and 4 % slower at 256
# (docs/lab/decode-512-sequences.md).
LARGE = 3 << 26
LARGE_UP_TO = 256


def expand_weights(model: PreTrainedModel, budget: int) -> int:
    """Give the NF4 layers of model's first decoder layers 16-bit copies of up to budget bytes in all; returns their bytes.

    A decoder layer gets the copies of all its NF4 layers or none.
    """
    taken = 0
    fused: list[int] = []
    layers = decoder_layers(model)
    for layer in layers:
        linears = [module for module in layer.modules() if isinstance(module, NF4Linear)]
        size = sum(copy_bytes(linear, model.dtype) for linear in linears)
        if taken + size > budget:
            break
        fused_up_to = _most_fused(linears, model.dtype)
        for linear in linears:
            linear.expand(model.dtype)
            linear.fused_up_to = fused_up_to
        taken += size
        if linears:
            fused.append(fused_up_to)
    if fused:
        logger.info(
            "weights of %d of %d decoder layers also in %s, %.2f GiB: steps of %d tokens and more use them",
            len(fused),
            len(layers),
            str(model.dtype).removeprefix("torch."),
            taken / 2**30,
            min(fused) + 1,
        )
    return taken


def copy_bytes(linear: NF4Linear, dtype: torch.dtype) -> int:
    """Bytes of one layer's copy."""
    return linear.out_features * linear.in_features * dtype.itemsize


def expanded_bytes(model: nn.Module) -> int:
    """Bytes of all copies that a model has."""
    linears = (module for module in model.modules() if isinstance(module, NF4Linear))
    return sum(linear.expanded.nbytes for linear in linears if linear.expanded is not None)


def _most_fused(linears: Sequence[NF4Linear], dtype: torch.dtype) -> int:
    """The most tokens that are multiplied by the codes of a layer's weights, which all have copies."""
    large = any(linear.out_features * linear.in_features >= LARGE for linear in linears)
    # 0 on devices whose GEMM of so many tokens is not fused.
    fuses = dtype is torch.bfloat16 and all(ops.token_tile(*linear.planned(LARGE_UP_TO)) for linear in linears)
    return LARGE_UP_TO if large and fuses else NF4Linear.EXPANDED_FROM - 1
