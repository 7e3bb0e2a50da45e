"""A decoder layer's forward by its compiled functions, and what is fixed of how the model calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from server.engine.runtime.compile.sharing import SharedEntries

# Up to this many tokens the fused operations are too small to be worth waking a second thread for.
FEW_TOKENS = 16
Path = tuple[int | str, ...]
"""Where a tensor is among a call's arguments: the argument, and keys inside it."""


@dataclass(frozen=True)
class Signature:
    """How the model calls a layer: where the tensors are among its arguments, and everything else."""

    tensors: tuple[Path, ...]
    constants: tuple[tuple[Path, Any], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    strided: tuple[int, ...] = ()
    """Which of the tensors are views that are not contiguous; compiled layers get copies of these."""
    shared: SharedEntries | None = None

    def pick(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call's arguments; the first holds the hidden states [..., tokens, width]."""
        tensors = []
        for path in self.tensors:
            key = path[0]
            value = args[key] if isinstance(key, int) else kwargs[key]
            for step in path[1:]:
                value = value[step]
            tensors.append(value)
        for index in self.strided:
            tensors[index] = tensors[index].contiguous()
        return tensors


class CompiledLayer:
    """A layer's forward, which picks the tensors out of its arguments; the other arguments are known to be constant."""

    def __init__(
        self, few: Callable[..., Any], many: Callable[..., Any], signature: Signature, own: list[torch.Tensor]
    ) -> None:
        """few computes up to FEW_TOKENS tokens, many computes more; both take the signature's tensors and then own."""
        self._few, self._many, self._own = few, many, own
        self._signature = signature

    @property
    def is_plain(self) -> bool:
        """Whether the layer takes its tensors as they are, and its result is all that it gives."""
        return self._signature.shared is None and not self._signature.strided

    def pick(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call's arguments; the first holds the hidden states [..., tokens, width]."""
        return self._signature.pick(args, kwargs)

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """What the compiled function gives for the tensors that pick() has found."""
        function = self._few if tensors[0].shape[-2] <= FEW_TOKENS else self._many
        return function(*tensors, *self._own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        output = self.run(self.pick(args, kwargs))
        shared = self._signature.shared
        if shared is None:
            return output
        output, entries = output
        kwargs[shared.argument].update(zip(shared.written, entries, strict=True))
        return output
