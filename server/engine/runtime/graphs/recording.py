"""The C calls of a small step, with the buffers they use: noted once and made again as one C call (recorded.cpp)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_MOST_ARGUMENTS = 16


class RecordingError(Exception):
    """The layers do something that cannot be recorded; the message is one line."""


class _Call(ctypes.Structure):
    """Call of recorded.cpp."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("arguments", ctypes.c_int64 * _MOST_ARGUMENTS),
    )


class Recording:
    """The calls of all layers for one number of tokens."""

    def __init__(self, inputs: list[torch.Tensor], run: Any) -> None:
        """inputs: examples of the tensors that the first layer gets."""
        self.inputs = [tensor.clone() for tensor in inputs]
        self.output = self.inputs[0]
        self._run = run
        self._calls: list[tuple[int, tuple[int, ...]]] = []
        self._array: Any = None
        self._kept: list[object] = []
        self._buffers: dict[object, torch.Tensor] = {}
        self._place = (0, 0)

    def begin_layer(self, layer: int) -> None:
        # A layer reads its own buffers and the result of the one before it, so two layers' buffers are enough.
        self._place = (layer % 2, 0)

    def empty(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A buffer that only the layer after the next one writes to again."""
        key = (self._place, shape, stride, dtype)
        self._place = (self._place[0], self._place[1] + 1)
        if key not in self._buffers:
            self._buffers[key] = torch.empty_strided(shape, stride, dtype=dtype)
        return self._buffers[key]

    def add(self, function: int, arguments: tuple[int, ...], *kept: object) -> None:
        """Note a call, and make it. kept: what its pointers belong to."""
        if len(arguments) > _MOST_ARGUMENTS:
            raise RecordingError(f"a function has {len(arguments)} arguments")
        self._calls.append((function, arguments))
        self._kept.extend(kept)
        self._run((_Call * 1)(_struct(function, arguments)), 1)

    def end(self, output: torch.Tensor) -> None:
        """output: the last layer's."""
        self.output = output
        self._array = (_Call * len(self._calls))(*(_struct(*call) for call in self._calls))

    def replay(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """What the last layer gives for what the first one gets."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        self._run(self._array, len(self._array))
        return self.output.clone()


def _struct(function: int, arguments: tuple[int, ...]) -> _Call:
    return _Call(function, len(arguments), (ctypes.c_int64 * _MOST_ARGUMENTS)(*arguments))
