"""The tensors in a checkpoint's files, of which shards read their parts only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from bitsandbytes.functional import QuantState
from transformers import PretrainedConfig

from server.checkpoint.base import CheckpointError
from server.checkpoint.diagnosis import first_line
from server.checkpoint.experts.names import place_of
from server.checkpoint.experts.tensors import BLOCKSIZE, CheckpointTensors
from server.checkpoint.inspection import ITEM_BYTES, CheckpointInfo, weight_files
from server.checkpoint.packed import read_packed
from server.checkpoint.sharding.roles import plan_of, role_of

_STATE = "quant_state.bitsandbytes__nf4"
_STATE_TENSORS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", _STATE)


class StoredTensors(CheckpointTensors):
    """The tensors of a checkpoint, mapped from its files: what is not used is not read."""

    def __init__(self, folder: Path, names: Mapping[str, str] | None = None) -> None:
        """names: what tensors are called in the files, by the names under which they are asked for; others are the same."""
        super().__init__(folder, weight_files(folder))
        self._names = names or {}

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self._names.get(str(name), name))

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of that name. Raises CheckpointError where there is none."""
        return self.read(self._names.get(name, name))

    def is_packed(self, name: str) -> bool:
        """Whether the weight of that name is in NF4."""
        return f"{self._names.get(name, name)}.{_STATE}" in self

    def quant_state(self, name: str) -> QuantState | None:
        """Format of the weight of that name; None if it is not quantized.

        Raises CheckpointError, by name, for what one rank refuses, too: scales that are not finite numbers among them.
        """
        if not self.is_packed(name):
            return None
        name = self._names.get(name, name)
        state = {suffix: self[f"{name}.{suffix}"] for suffix in _STATE_TENSORS if f"{name}.{suffix}" in self}
        try:
            read_packed(name, {"weight": self[name], **state})
        except CheckpointError as e:
            raise CheckpointError(f"{self.folder}: {e}") from e
        try:
            return QuantState.from_dict(state, torch.device("cpu"))
        except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as e:
            raise CheckpointError(f"{self.folder}: damaged: the quant_state of {name}: {first_line(e)}") from e


def blocksizes_of(info: CheckpointInfo) -> dict[str, int]:
    """Weights of one scale block, by the names of NF4 weights: how many codes each has for a scale. No file is read."""
    sizes = {}
    for name, table in info.packed.items():
        scales = math.prod(info.tensors.get(f"{name}.absmax", ("", (0,)))[1])
        if table == "nf4" and name in info.tensors and scales:  # what is missing is told when the weight is read
            dtype, shape = info.tensors[name]
            weights = 2 * math.prod(shape) * ITEM_BYTES.get(dtype, 1)
            # Sizes are powers of two, and only the last block may be shorter.
            sizes[name] = 1 << (-(-weights // scales) - 1).bit_length()
    return sizes


def largest_blocks(info: CheckpointInfo, config: PretrainedConfig) -> tuple[int, str | None]:
    """Weights of one scale block of the weight that has the largest ones, among those that shards have a part of.

    Parts that are whole blocks of this size are whole blocks of all smaller ones. With it comes the weight's name where not
    all have blocks of one size.
    """
    plan = plan_of(config)
    sizes = {
        name: size
        for name, size in blocksizes_of(info).items()
        if place_of(name) or role_of(name.rpartition(".")[0], plan) is not None
    }
    if not sizes:
        return BLOCKSIZE, None
    name = max(sizes, key=lambda name: sizes[name])
    return sizes[name], None if len(set(sizes.values())) == 1 else name
