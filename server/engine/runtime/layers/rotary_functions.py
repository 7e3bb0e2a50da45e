"""Rotary functions in the files of attentions' classes: their results, and the attentions that call them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from server.engine.runtime.attention.rotary import RotaryEmbedding

_NAME = "apply_rotary_pos_emb"


def rotating(attentions: Sequence[nn.Module], run: Callable[[], object]) -> list[bool]:
    """Whether each attention calls its file's rotary function while run() runs the model; all True if none does.

    Some families leave rotary embeddings out of some layers (NoPE).
    """
    running: list[nn.Module] = []
    found: set[nn.Module] = set()

    def begin(module: nn.Module, _: tuple[Any, ...]) -> None:
        running[:] = [module]

    def watched(own: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **named: Any) -> Any:
            found.update(running)
            return own(*args, **named)

        return function

    with ExitStack() as undo:
        for file in {sys.modules[type(attention).__module__] for attention in attentions}:
            own = getattr(file, _NAME, None)
            if own is not None:
                setattr(file, _NAME, watched(own))
                undo.callback(setattr, file, _NAME, own)
        for attention in attentions:
            undo.callback(attention.register_forward_pre_hook(begin).remove)
        run()
    return [not found or attention in found for attention in attentions]


def takes_angles_once(attention: nn.Module) -> bool:
    """Whether an attention's rotary function takes one angle for each pair of elements, rather than for each element."""
    heads, angles = torch.zeros(1, 1, 2, 8), torch.zeros(1, 2, 4)
    found, ones = (_rotated(attention, given, angles, angles) for given in (heads, heads + 1))
    # Others that take angles of half a head's columns rotate these columns only, and drop or keep the rest.
    return found is not None and ones is not None and found.shape == heads.shape and not bool(ones.any())


def angle_step(attention: nn.Module) -> int:
    """RotaryEmbedding.angle_step of an attention's rotary function."""
    random = torch.Generator().manual_seed(0)
    heads, cos, sin = (torch.randn(shape, generator=random) for shape in ((1, 1, 2, 8), (1, 2, 4), (1, 2, 4)))
    # Functions that read each element's own angle expect neighbours to have the same one.
    cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    found = _rotated(attention, heads, cos, sin)
    if found is None or found.shape != heads.shape:
        return 0
    for step in (1, 2):
        rotary = RotaryEmbedding(cos[0], sin[0], angle_step=step)
        expected = rotary.apply(heads[0].transpose(0, 1), heads[0].transpose(0, 1))[0]
        if torch.allclose(found[0].transpose(0, 1), expected, atol=1e-5):
            return step
    return 0


def _rotated(attention: nn.Module, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """Apply an attention's rotary function to queries [1, heads, T, dim]; None if it takes other arguments."""
    rotate = getattr(sys.modules[type(attention).__module__], _NAME, None)
    try:
        found = rotate(heads, heads, cos, sin)[0] if rotate is not None else None
    except (RuntimeError, TypeError, ValueError):
        return None
    return found if isinstance(found, torch.Tensor) else None
