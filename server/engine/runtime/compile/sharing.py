"""Keys and values that decoder layers hand on to later layers (Gemma 3n and 4): which layer reads and which writes them."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class SharedEntries:
    """What a layer does with the mapping that its model passes to all layers as one argument."""

    argument: str
    read: tuple[str, ...]
    written: tuple[str, ...]

    def outputs(self, mapping: Mapping[str, tuple[torch.Tensor, ...]]) -> tuple[tuple[torch.Tensor, ...], ...]:
        """The entries that the layer has written, contiguous, as layers are compiled to read them."""
        return tuple(tuple(tensor.contiguous() for tensor in mapping[key]) for key in self.written)


class WatchedMapping(UserDict[str, tuple[torch.Tensor, ...]]):
    """The mapping as one layer sees it: notes what the layer reads and writes."""

    def __init__(self, shared: MutableMapping[str, Any]) -> None:
        super().__init__()
        self._shared = shared
        self.read: dict[str, tuple[torch.Tensor, ...]] = {}
        self.written: dict[str, None] = {}

    def __getitem__(self, key: str) -> Any:
        self.read[key] = tuple(self._shared[key])
        return self._shared[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.written[key] = None
        self._shared[key] = value

    def entries(self, argument: str) -> SharedEntries:
        """What the layer has done."""
        return SharedEntries(argument, tuple(self.read), tuple(self.written))
