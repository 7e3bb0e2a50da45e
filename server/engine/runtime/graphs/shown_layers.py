"""A list of layers that shows a model's class only those that it has to go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn


class ShownLayers(nn.ModuleList):
    """A model's layers, from which a function chooses whenever the model's class goes through all of them or a slice.

    Going through thirty layers, each of which only says that it has been computed already, takes half a millisecond.
    """

    choose: Callable[[Sequence[nn.Module]], Sequence[nn.Module]]

    @classmethod
    def put(cls, layers: nn.ModuleList, choose: Callable[[Sequence[nn.Module]], Sequence[nn.Module]]) -> None:
        """Make a plain list of layers one of these; a list of another class stays as it is."""
        if type(layers) is nn.ModuleList:
            layers.__class__ = cls
            layers.choose = choose  # type: ignore[assignment]

    @classmethod
    def take(cls, layers: nn.ModuleList) -> None:
        """Undo put()."""
        if type(layers) is cls:
            del layers.choose
            layers.__class__ = nn.ModuleList  # type: ignore[assignment]

    def __getitem__(self, index: int | slice) -> Any:
        """One layer, or what is chosen from a slice."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        return self.choose(list(self.children())[index])

    def __iter__(self) -> Iterator[nn.Module]:
        """What is chosen from all layers."""
        return iter(self.choose(list(self.children())))
