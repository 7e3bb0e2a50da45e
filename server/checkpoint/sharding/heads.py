"""Part that a shard has of parameters of all heads: attention sinks, and norms over all heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from server.checkpoint.base import CheckpointError
from server.checkpoint.sharding.shards import Part, Shard, heads_of, layer_configs
from server.checkpoint.sharding.widths import range_of

# A norm between a projection and the split into heads, and the projection.
_NORMS = {"q_norm": "q_proj", "k_norm": "k_proj"}


def sinks_of(whole: nn.Module, own: nn.Module, shard: Shard) -> dict[str, tuple[range, ...]]:
    """The shard's elements of parameters that have one number for each query head (attention sinks), by name.

    whole, own: the model as it is and the shard (of shard_config()), which may be on the meta device.
    """
    layers, narrowed = (layer_configs(_config(model)) for model in (whole, own))
    heads = {(heads_of(layer)[0], heads_of(narrow)[0]) for layer, narrow in zip(layers, narrowed, strict=True)}
    narrow = dict(own.named_parameters())
    sizes = {
        name: (parameter.numel(), narrow[name].numel())
        for name, parameter in whole.named_parameters()
        if parameter.dim() == 1
    }
    return {
        name: (range_of(n, each, shard.rank),) for name, (n, each) in sizes.items() if (n, each) in heads and each < n
    }


def norms_of(whole: nn.Module, own: nn.Module, shard: Shard, folder: object) -> dict[str, str]:
    """The names of norms that are over all heads, each with that of its projection. Modules as sinks_of() has them.

    Raises CheckpointError for one that is not the root mean square that models have.
    """
    found = {}
    narrow = dict(own.named_modules())
    for name, module in whole.named_modules():
        for last, projection in _NORMS.items():
            norm, linear = getattr(module, last, None), getattr(module, projection, None)
            weight = getattr(norm, "weight", None)
            if not isinstance(linear, nn.Linear) or weight is None or weight.numel() != linear.out_features:
                continue
            if getattr(narrow[name], projection).out_features == linear.out_features:
                continue
            if not hasattr(norm, "variance_epsilon") or weight.dim() != 1 or len(list(norm.parameters())) != 1:  # type: ignore[union-attr]
                raise CheckpointError(
                    f"{folder}: engine.tensor_parallel_size {shard.count}: {name}.{last} spans all heads and cannot be split"
                )
            found[f"{name}.{last}"] = f"{name}.{projection}"
    return found


def split_norms(own: nn.Module, norms: dict[str, str], parts: dict[str, Part]) -> dict[str, tuple[range, ...]]:
    """Give the shard's norms over all heads the size of their projection's part; the elements of their weights, by name."""
    rows = {}
    for name, projection in norms.items():
        part = parts[projection]
        own.get_submodule(name).weight = nn.Parameter(torch.empty(part.shape[0], device="meta"), requires_grad=False)
        rows[f"{name}.weight"] = part.rows
    return rows


def _config(model: Any) -> Any:
    return model.config.get_text_config()
