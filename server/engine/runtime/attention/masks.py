"""Windows of a model's layers, read from the mask functions that transformers makes for it.

Some families give their window to the attention function and some have it in the mask alone (Phi-MoE, Qwen2-MoE), which
the paged attention never sees. transformers' own forward follows the mask, so the mask decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionMaskInterface

FARTHEST = 2**20
"""Positions up to which masks are looked at; no model's window is longer."""
_MARK = 0x6E663400
MaskFunction = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Reach:
    """Keys that a query at position i sees: all up to i, those within a window, or those of its own chunk."""

    window: int | None = None
    """j > i - window."""
    chunk: int | None = None
    """j // chunk == i // chunk."""


class UnknownMaskError(Exception):
    """A mask that is neither causal, nor a window, nor chunks; the message is the end of a sentence."""


class MaskReader:
    """Finds which mask each layer of a model is given, where the model runs under an implementation's name."""

    def __init__(self, name: str) -> None:
        """name: an attention implementation's; transformers makes masks for it by the newest reader of that name."""
        self._functions: list[MaskFunction] = []
        AttentionMaskInterface.register(name, self._mark)

    def _mark(self, *, mask_function: MaskFunction, device: torch.device, **_: Any) -> torch.Tensor:
        self._functions.append(mask_function)
        return torch.full((1, 1, 1, 1), _MARK + len(self._functions) - 1, dtype=torch.int64, device=device)

    def reach(self, mask: torch.Tensor, positions: int) -> Reach:
        """Read from a layer's mask what it sees in contexts of `positions` tokens. Raises UnknownMaskError."""
        index = int(mask) - _MARK if mask.numel() == 1 and mask.dtype == torch.int64 else -1
        if not 0 <= index < len(self._functions):
            raise UnknownMaskError("has a mask of its own, which the paged attention ignores")
        return read_mask(self._functions[index], min(positions, FARTHEST), mask.device)


def read_mask(function: MaskFunction, positions: int, device: torch.device | None = None) -> Reach:
    """Read from a mask function of transformers' (batch, head, query, keys) what queries below positions see.

    device: where the function's own tensors are; None: the CPU. Raises UnknownMaskError.
    """
    keys = torch.arange(positions, device=device)

    def seen(query: int) -> torch.Tensor:
        return function(0, 0, torch.tensor(query, device=device), keys).expand(positions)

    def causal(query: int, first: int) -> torch.Tensor:
        return (keys <= query) & (keys >= first)

    try:
        # The first query that does not see key 0: as far as a window or a chunk is long.
        low, high = 0, positions
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if bool(seen(middle)[0]) else (low, middle)
        samples = {0, 1, low - 1, low, low + 1, 2 * low, positions // 2, positions - 1}
        queries = sorted(query for query in samples if 0 <= query < positions)
        masks = [(query, seen(query)) for query in queries]
    except (IndexError, RuntimeError, TypeError) as e:
        raise UnknownMaskError(f"has a mask that cannot be read ({type(e).__name__})") from e
    if low > 0 and all(bool((mask == causal(query, query - low + 1)).all()) for query, mask in masks):
        return Reach(window=low if low < positions else None)
    if low > 0 and all(bool((mask == causal(query, query // low * low)).all()) for query, mask in masks):
        return Reach(chunk=low)
    raise UnknownMaskError("has a mask that is neither causal nor a window nor chunks")
