"""Division of a model among the processes of tensor parallelism: which process has which rows and columns of each weight.

A shard is a model of its own with fewer heads and a narrower MLP, which transformers builds from a configuration that
says so. What is narrower in it than in the whole model shows how each weight is split: along n, along k, or not at all.
transformers' plan for the model (base_model_tp_plan), else the projection's name, has to agree.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from server.checkpoint.base import CheckpointError
from server.checkpoint.sharding.roles import plan_of, role_of
from server.checkpoint.sharding.state_sizes import narrow_states, state_sizes, states_in_words, undivided_states
from server.checkpoint.sharding.widths import WIDTHS, is_padded, part_of_width, range_of, widths_of

# Embeddings and the output layer are padded so that each shard has a multiple of this many rows.
VOCABULARY_MULTIPLE = 64
MOST_SHARDS = 64


@dataclass(frozen=True)
class Shard:
    """One of count equal parts of a model."""

    rank: int = 0
    count: int = 1
    blocksize: int = 64
    """Weights of one scale block, which is never divided."""

    def rows_of(self, size: int) -> range:
        """Its rows of something padded and divided evenly, such as a vocabulary; the padding included."""
        each = -(-size // (self.count * VOCABULARY_MULTIPLE)) * VOCABULARY_MULTIPLE
        return range(self.rank * each, (self.rank + 1) * each)


@dataclass(frozen=True)
class Part:
    """Part that a shard has of a linear layer's weight [n, k]: ranges of rows, one after another, and a range of columns.

    padding: zeros behind the columns of a part of k, or else behind each range of rows (see widths.py).
    """

    whole: tuple[int, int]
    rows: tuple[range, ...]
    columns: range
    padding: int = 0

    @classmethod
    def of_whole(cls, linear: nn.Linear) -> Part:
        """All of a layer."""
        n, k = linear.out_features, linear.in_features
        return cls((n, k), (range(n),), range(k))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [n, k] of the shard's own weight."""
        n = sum(len(rows) for rows in self.rows)
        if self.is_partial:
            return n, len(self.columns) + self.padding
        return n + self.padding * len(self.rows), len(self.columns)

    @property
    def is_partial(self) -> bool:
        """Whether it has a part of k: then the outputs of all shards add up to the layer's."""
        return len(self.columns) < self.whole[1]

    def rows_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part's rows of a tensor [n, ...], its zeros included."""
        padding = () if self.is_partial or not self.padding else (whole.new_zeros(self.padding, *whole.shape[1:]),)
        return torch.cat([piece for rows in self.rows for piece in (whole[rows.start : rows.stop], *padding)])

    def columns_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part's columns of a tensor [m, k], its zeros included."""
        own = whole[:, self.columns.start : self.columns.stop]
        return nn.functional.pad(own, (0, self.padding)) if self.is_partial and self.padding else own


def possible_counts(config: PretrainedConfig, blocksize: int) -> list[int]:
    """Into how many shards a model can be divided. blocksize: of its NF4 weights, whose scale blocks stay whole."""
    text = config.get_text_config()
    if _undivided(config):
        return [1]
    layers = [(*heads_of(layer), widths_of(layer).values(), _value_dim(layer)) for layer in layer_configs(text)]
    most = min(MOST_SHARDS, *(heads for heads, *_ in layers))
    states = state_sizes(text, blocksize)
    return [1] + [
        count
        for count in range(2, most + 1)
        if all(
            heads % count == 0
            and (kv_heads % count == 0 or count % kv_heads == 0)
            and all(part_of_width(width, count, blocksize) for width in widths)
            and heads // count * dim % blocksize == 0
            for heads, kv_heads, widths, dim in layers
        )
        and all(size % count == 0 and size // count % multiple == 0 for size, multiple in states)
    ]


def check_count(config: PretrainedConfig, blocksize: int, count: int, what: str, largest: str | None = None) -> None:
    """Raise CheckpointError, with what could be, where a model cannot be divided into count shards.

    largest: the name of a weight with blocks of blocksize, where others have smaller ones.
    """
    possible = possible_counts(config, blocksize)
    if count in possible:
        return
    reason = _undivided(config)
    if reason is None:
        text = config.get_text_config()
        layers = layer_configs(text)
        widths = sorted({width for layer in layers for width in widths_of(layer).values()})
        heads, kv_heads = (
            " and ".join(str(size) for size in sorted(set(sizes)))
            for sizes in zip(*(heads_of(layer) for layer in layers), strict=True)
        )
        wide = f"{' or '.join(map(str, widths))} features of {'the MLP' if len(widths) < 2 else 'its MLPs'}"
        reason = f"{heads} heads, {kv_heads} KV heads and {wide} in blocks of {blocksize}"
        reason += f", as {largest} has them" if largest else ""
        reason += states_in_words(text)
    raise CheckpointError(
        f"{what}: engine.tensor_parallel_size {count} does not divide the model: it has {reason};"
        f" possible: {', '.join(map(str, possible))}"
    )


def _undivided(config: PretrainedConfig) -> str | None:
    """The parts of a model that cannot be divided yet, whatever their sizes."""
    text = config.get_text_config()
    if getattr(text, "activation_sparsity_pattern", None):
        return "MLPs that keep the largest of all their features (Gemma 3n), which are not split"
    return undivided_states(text)


def shard_config(config: PretrainedConfig, count: int, blocksize: int = 64) -> PretrainedConfig:
    """The configuration of one of count shards, which are alike; KV heads are repeated where there are fewer.

    blocksize as possible_counts() has it, which has to have count."""
    own = copy.deepcopy(config)
    text = own.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        return _narrow_layers(own, text, count, blocksize)
    heads, kv_heads = heads_of(text)
    text.head_dim = _head_dim(text)
    text.num_attention_heads = heads // count
    if getattr(text, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = max(1, kv_heads // count)
    narrow_states(text, count)
    for name, width in widths_of(text).items():
        setattr(text, name, part_of_width(width, count, blocksize))
    if getattr(text, "block_auto_adjust_ff_dim", False):  # the widths are what it would be adjusted to
        text.block_auto_adjust_ff_dim = False
    return own


def _narrow_layers(own: PretrainedConfig, text: Any, count: int, blocksize: int) -> PretrainedConfig:
    """shard_config() of a model some of whose layers have sizes of their own (Gemma 4); text is own's text model."""
    layers: dict[str, dict[str, Any]] = text.to_dict()["per_layer_config"]
    text.per_layer_config = None  # so that the sizes of the other layers can be read
    for sizes in (text.__dict__, *layers.values()):
        for name in ("num_attention_heads", "num_key_value_heads"):
            if name in sizes:
                sizes[name] = max(1, sizes[name] // count)
        for name in WIDTHS & sizes.keys():
            if sizes[name]:
                sizes[name] = part_of_width(sizes[name], count, blocksize)
    text.per_layer_config = layers
    return own


def layer_configs(text: Any) -> list[Any]:
    """The configurations of a text model's layers that have sizes of their own, else its only one."""
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text]


def parts_of(
    whole: nn.Module,
    own: nn.Module,
    config: PretrainedConfig,
    shard: Shard,
    folder: object,
    others: Collection[str] = (),
) -> dict[str, Part]:
    """Part that a shard has of every linear layer, by the layer's name. The modules may be on the meta device.

    whole, own: the model as it is, and the shard (of shard_config()). others: modules and parameters that are divided
    otherwise. Raises CheckpointError where the two do not differ as a known way of dividing makes them differ.
    """
    parts: dict[str, Part] = {}
    plan = plan_of(config)
    vocabulary = {id(m) for m in (whole.get_input_embeddings(), whole.get_output_embeddings())}  # type: ignore[operator]
    own_modules = dict(own.named_modules())
    for name, module in whole.named_modules():
        if id(module) in vocabulary or name in others:
            continue
        # Routers are subclasses, with code of their own; what they have is whole.
        if type(module) is nn.Linear:
            theirs = own_modules[name]
            assert isinstance(theirs, nn.Linear)
            parts[name] = _part(name, module, theirs, role_of(name, plan), config, shard, folder)
            continue
        if isinstance(module, Conv1D):
            # GPT-2 has no size of a head: with fewer heads, shapes stay as they are.
            raise CheckpointError(
                f"{folder}: engine.tensor_parallel_size {shard.count}: {name} is a Conv1D, which is not divided;"
                f" possible: 1"
            )
        for key, parameter in module.named_parameters(recurse=False):
            if f"{name}.{key}" not in others and parameter.shape != getattr(own_modules[name], key).shape:
                raise CheckpointError(
                    f"{folder}: engine.tensor_parallel_size {shard.count}: no rule says how {name}.{key}"
                    f" {list(parameter.shape)} is split"
                )
    return parts


def _part(
    name: str,
    whole: nn.Linear,
    own: nn.Linear,
    role: str | None,
    config: PretrainedConfig,
    shard: Shard,
    folder: object,
) -> Part:
    n, k = whole.out_features, whole.in_features
    rows, columns, each = _rows(name, n, own.out_features, config, shard), range(k), own.in_features
    split_k = each < k
    if split_k:
        columns = range_of(k, each, shard.rank)
    repeated = own.out_features == n and role == "n" and (shard.count == 1 or _has_single_head(config))
    expected = "k" if split_k else "n" if own.out_features < n or repeated else None
    divided = each * shard.count == k or is_padded(k, each, shard.count)
    fits = rows is not None and (not split_k or (own.out_features == n and divided))
    if rows is None or not fits or role != expected:
        raise CheckpointError(
            f"{folder}: engine.tensor_parallel_size {shard.count}: no rule says how {name} [{n}, {k}] is split"
        )
    padding = each - len(columns) if split_k else own.out_features // len(rows) - len(rows[0])
    return Part((n, k), rows, columns, 0 if len(rows) == 3 else padding)


def _has_single_head(config: PretrainedConfig) -> bool:
    """Whether some layers have a single KV head, which all shards have: its projections stay whole."""
    return any(heads_of(layer)[1] == 1 for layer in layer_configs(config.get_text_config()))


def _rows(name: str, n: int, own: int, config: PretrainedConfig, shard: Shard) -> tuple[range, ...] | None:
    """The ranges of a weight's n rows that the shard has, `own` rows in all; None where n cannot be divided so."""
    last = name.rpartition(".")[2]
    sections = [(n, own)]
    if own < n and last == "qkv_proj":
        text, sharded = config.get_text_config(), shard_config(config, shard.count, shard.blocksize).get_text_config()
        dim = _head_dim(text)
        (heads, kv_heads), (own_heads, own_kv_heads) = heads_of(text), heads_of(sharded)
        sections = [(heads * dim, own_heads * dim), *[(kv_heads * dim, own_kv_heads * dim)] * 2]
    elif own < n and last == "gate_up_proj":
        sections = [(n // 2, own // 2)] * 2
    if sum(size for size, _ in sections) != n or sum(size for _, size in sections) != own:
        return None
    rows, start = [], 0
    for size, each in sections:
        if is_padded(size, each, shard.count):
            own_rows = range_of(size, each, shard.rank)
            rows.append(range(start + own_rows.start, start + own_rows.stop))
            start += size
            continue
        pieces = size // each
        if pieces * each != size or shard.count % pieces:
            return None
        # Fewer pieces than shards: KV heads, each of which several shards have.
        first = start + shard.rank * pieces // shard.count * each
        rows.append(range(first, first + each))
        start += size
    return tuple(rows)


def heads_of(text: Any) -> tuple[int, int]:
    """(heads, KV heads)."""
    heads = text.num_attention_heads
    return heads, getattr(text, "num_key_value_heads", None) or heads


def _head_dim(text: Any) -> int:
    dim: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return dim


def _value_dim(text: Any) -> int:
    """Features of a head's values, which latent attention gives a size of their own."""
    dim: int = getattr(text, "v_head_dim", None) or _head_dim(text)
    return dim
