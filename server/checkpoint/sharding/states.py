"""Part that a shard has of layers with states: heads of the gated delta rule, or channels of a short convolution.

A rank has whole key heads with all value heads that read them, so that its states are its own and one sum behind the output
projection is all that ranks exchange. Channels of a short convolution do not read one another, and are divided the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.base import CheckpointError
from server.checkpoint.sharding.shards import Part, Shard
from server.checkpoint.sharding.widths import range_of
from server.checkpoint.states import state_modules

_OF_VALUES = ("in_proj_z", "in_proj_qkvz", "in_proj_b", "in_proj_a", "in_proj_ba")
"""Projections whose rows are those of one head after another, in the order of the heads."""


@dataclass
class StateParts:
    """Parts that a shard has of layers with states, by name."""

    parts: dict[str, Part] = field(default_factory=dict)
    """Of linear layers."""
    rows: dict[str, tuple[range, ...]] = field(default_factory=dict)
    """Of other parameters, which are split along their first dimension."""


def states_of(whole: PreTrainedModel, own: PreTrainedModel, shard: Shard, folder: object) -> StateParts:
    """Divide the layers with states; own's short convolutions become as narrow as their parts.

    whole, own: the model as it is and the shard (of shard_config()), on the meta device. Raises CheckpointError for a layer
    whose parts no rule describes.
    """
    found = StateParts()
    names = {id(module): name for name, module in whole.named_modules()}
    for theirs, narrow in zip(state_modules(whole), state_modules(own), strict=True):
        name = names[id(theirs)]
        if hasattr(theirs, "num_v_heads"):
            _add_heads(found, name, theirs, shard)
        else:
            _add_channels(found, name, theirs, shard)
            _narrow_convolution(narrow, shard)
        for child, linear in _linears(narrow):
            part = found.parts.get(f"{name}.{child}")
            if part is None or part.shape != (linear.out_features, linear.in_features):
                raise CheckpointError(
                    f"{folder}: engine.tensor_parallel_size {shard.count}: no rule says how {name}.{child} is split"
                )
    return found


def _add_heads(found: StateParts, name: str, module: Any, shard: Shard) -> None:
    """Add the parts of a layer with the gated delta rule."""
    keys, values = module.num_k_heads * module.head_k_dim, module.num_v_heads * module.head_v_dim
    own_keys, own_values, heads = (_share(size, shard) for size in (keys, values, module.num_v_heads))
    channels = (own_keys, _behind(own_keys, keys), _behind(own_values, 2 * keys))
    for child, linear in _linears(module):
        n, k = linear.out_features, linear.in_features
        if child == "in_proj_qkv":
            found.parts[f"{name}.{child}"] = Part((n, k), channels, range(k))
        elif child in _OF_VALUES:
            found.parts[f"{name}.{child}"] = Part((n, k), (_share(n, shard),), range(k))
        elif child == "out_proj":
            found.parts[f"{name}.{child}"] = Part((n, k), (range(n),), own_values)
    found.rows |= {f"{name}.conv1d.weight": channels, f"{name}.A_log": (heads,), f"{name}.dt_bias": (heads,)}


def _add_channels(found: StateParts, name: str, module: Any, shard: Shard) -> None:
    """Add the parts of a layer with a short convolution, whose inputs are three of each channel."""
    size = module.conv.out_channels
    own = _share(size, shard)
    thirds = (own, _behind(own, size), _behind(own, 2 * size))
    found.parts[f"{name}.in_proj"] = Part((3 * size, module.in_proj.in_features), thirds, range(size))
    found.parts[f"{name}.out_proj"] = Part((module.out_proj.out_features, size), (range(size),), own)
    found.rows |= {f"{name}.conv.{key}": (own,) for key, _ in module.conv.named_parameters(recurse=False)}


def _narrow_convolution(module: Any, shard: Shard) -> None:
    """Make a layer with a short convolution one of the shard's channels: its class takes them from the hidden size."""
    whole, biased = module.conv, module.conv.bias is not None
    size, hidden, dtype = whole.out_channels // shard.count, module.in_proj.in_features, whole.weight.dtype
    with torch.device("meta"):
        module.conv = nn.Conv1d(
            size, size, whole.kernel_size[0], groups=size, bias=biased, padding=whole.padding[0], dtype=dtype
        )
        module.in_proj = nn.Linear(hidden, 3 * size, biased, dtype=dtype)
        module.out_proj = nn.Linear(size, hidden, biased, dtype=dtype)


def _linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, child) for name, child in module.named_children() if isinstance(child, nn.Linear))


def _share(size: int, shard: Shard) -> range:
    return range_of(size, size // shard.count, shard.rank)


def _behind(own: range, first: int) -> range:
    """The same rows of what begins at row `first`."""
    return range(first + own.start, first + own.stop)
