"""The tensors in a checkpoint's files, of which shards read their parts only."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from safetensors import SafetensorError, safe_open

from server.checkpoint.base import CheckpointError
from server.checkpoint.inspection import CheckpointInfo, weight_files

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
        """How the weight of that name is quantized; None where it is not."""
        if not self.is_packed(name):
            return None
        name = self._names.get(name, name)
        named = {suffix: f"{name}.{suffix}" for suffix in _STATE_TENSORS}
        return QuantState.from_dict({s: self[full] for s, full in named.items() if full in self}, torch.device("cpu"))


def blocksize_of(info: CheckpointInfo) -> int:
    """Weights of one scale block: the largest among the NF4 weights of a checkpoint."""
    if info.quantization == "none":
        return BLOCKSIZE
    with StoredTensors(info.folder) as stored:
        names = [name.removesuffix(f".{_STATE}") for name in info.tensors if name.endswith(_STATE)]
        states = [stored.quant_state(name) for name in names[:1]]
    return max(int(state.blocksize) for state in states if state is not None)
