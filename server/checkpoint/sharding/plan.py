"""Plan of a shard before any weight is read: what it has of everything, or why it cannot be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from server.checkpoint.base import CheckpointError
from server.checkpoint.classes import Loading, is_left_out, loading_of
from server.checkpoint.experts.loading import ExpertsLoader
from server.checkpoint.inspection import CheckpointInfo, inspect_checkpoint
from server.checkpoint.quantizer import names_in_model
from server.checkpoint.sharding.experts import ExpertsPart, experts_of, take_experts
from server.checkpoint.sharding.heads import norms_of, sinks_of, split_norms
from server.checkpoint.sharding.memory import shard_bytes
from server.checkpoint.sharding.multimodal import keep_text_model, set_type
from server.checkpoint.sharding.shards import Part, Shard, check_count, parts_of, shard_config
from server.checkpoint.sharding.states import states_of
from server.checkpoint.sharding.stored import largest_blocks


class EmptyShard(NamedTuple):
    """A shard on the meta device, and what it has of everything that is divided, each by its name."""

    model: PreTrainedModel
    parts: dict[str, Part]
    """Of linear layers."""
    experts: dict[str, ExpertsPart]
    """Of modules of experts."""
    rows: dict[str, tuple[range, ...]]
    """Of other parameters, which are split along their first dimension."""
    norms: tuple[str, ...]
    """The names of norms over all heads, whose weights are among these."""


@dataclass(frozen=True)
class ShardPlan:
    """A shard of a checkpoint, ready to be filled."""

    info: CheckpointInfo
    """The checkpoint, without the tensors of its towers."""
    shard: Shard
    empty: EmptyShard
    experts: ExpertsLoader
    """Fills in the experts, of which the empty model has none."""
    names: dict[str, str]
    """The model's names of tensors, by their names in the files."""
    num_bytes: int
    """Bytes that it takes once it is filled, towers included."""


def plan_shard(folder: Path, device: torch.device, dtype: torch.dtype, shard: Shard, towers: bool = False) -> ShardPlan:
    """The plan of load_shard(), by which nothing is on device yet.

    Raises CheckpointError for all that load_shard() refuses by the names and shapes of a checkpoint.
    """
    whole = inspect_checkpoint(folder)
    chosen = loading_of(whole)
    info, blocksize = divided(whole, chosen, shard.count)
    shard = replace(shard, blocksize=blocksize)
    empty = empty_shard(chosen.config, dtype, shard, folder, chosen.auto, towers)
    experts = take_experts(empty.model, empty.experts, info, device, dtype)
    names = names_in_model(whole, empty.model, chosen.key_mapping)
    num_bytes = shard_bytes(info, empty.model, empty.parts, empty.experts, names, shard, dtype.itemsize)
    if towers:
        num_bytes += whole.without(lambda name: name in info.tensors).loaded_bytes(dtype.itemsize)
    return ShardPlan(info, shard, empty, experts, names, num_bytes)


def divided(whole: CheckpointInfo, chosen: Loading, count: int) -> tuple[CheckpointInfo, int]:
    """Sizes of a checkpoint that are divided, and weights of one scale block. chosen: what loading_of() says.

    Raises CheckpointError where count shards cannot be, as far as no model has to be made to see it.
    """
    info = whole.without(lambda name: is_left_out(name, chosen.config))
    check_divisible(info)
    blocksize, largest = largest_blocks(info, chosen.config)
    check_count(chosen.config, blocksize, count, str(whole.folder), largest)
    return info, blocksize


def check_divisible(info: CheckpointInfo) -> None:
    """Raise CheckpointError, by name, for what is served by one GPU only."""
    other = next((name for name, table in info.packed.items() if table != "nf4"), None)
    if other is not None:
        raise CheckpointError(
            f"{info.folder}: {other} in {info.packed[other]} cannot be divided among GPUs yet:"
            " engine.tensor_parallel_size must be 1"
        )


def empty_shard(
    config: PretrainedConfig,
    dtype: torch.dtype,
    shard: Shard,
    folder: Path,
    auto: Any = AutoModelForCausalLM,
    towers: bool = False,
) -> EmptyShard:
    """A shard on the meta device, and its parts. auto: as Loading has it. Raises CheckpointError."""
    own = shard_config(config, shard.count, shard.blocksize)
    for each in (config, own):
        set_type(each, dtype)
    try:
        with torch.device("meta"):
            whole, model = (auto.from_config(each) for each in (config, own))
    except (ValueError, KeyError, RuntimeError) as e:
        raise CheckpointError(f"{folder}: no model can be made of its config.json: {e}") from e
    keep_text_model(whole, model, towers)
    experts = experts_of(whole, model, shard, folder)
    sinks, norms = sinks_of(whole, model, shard), norms_of(whole, model, shard, folder)
    states = states_of(whole, model, shard, folder)
    others = {*experts, *sinks, *norms, *states.parts, *states.rows}
    parts = parts_of(whole, model, config, shard, folder, others) | states.parts
    rows = sinks | states.rows | split_norms(model, norms, parts)
    return EmptyShard(model, parts, experts, rows, tuple(norms))
