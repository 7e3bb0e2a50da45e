"""The tensors in a checkpoint's files, of which shards read their parts only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from server.checkpoint.base import CheckpointError
from server.checkpoint.diagnosis import first_line
from server.checkpoint.experts.names import place_of
from server.checkpoint.inspection import ITEM_BYTES, CheckpointInfo, weight_files
from server.checkpoint.packed import read_packed
from server.checkpoint.sharding.roles import plan_of, role_of

BLOCKSIZE = 64
"""Weights under one scale where weights are quantized while they are loaded."""
_STATE = "quant_state.bitsandbytes__nf4"
_STATE_TENSORS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", _STATE)


class StoredTensors:
    """The tensors of a checkpoint, mapped from its files: what is not used is not read. A context manager."""

    def __init__(self, folder: Path, names: Mapping[str, str] | None = None) -> None:
        """names: what tensors are called in the files, by the names under which they are asked for; others are the same."""
        self._folder = folder
        self._names = names or {}
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        try:
            for path in weight_files(folder):
                file = self._open.enter_context(safe_open(path, framework="pt"))
                self._files |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"{folder}: damaged: {' '.join(str(e).split())}") from e

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return self._names.get(name, name) in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor of that name. Raises CheckpointError where there is none."""
        name = self._names.get(name, name)
        if name not in self._files:
            raise CheckpointError(f"{self._folder}: damaged: missing keys: {name}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def is_packed(self, name: str) -> bool:
        """Whether the weight of that name is in NF4."""
        return f"{self._names.get(name, name)}.{_STATE}" in self._files

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
            raise CheckpointError(f"{self._folder}: {e}") from e
        try:
            return QuantState.from_dict(state, torch.device("cpu"))
        except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as e:
            raise CheckpointError(f"{self._folder}: damaged: the quant_state of {name}: {first_line(e)}") from e


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
