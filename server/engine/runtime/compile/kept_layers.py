"""Decoder layers of captured steps: functions for one number of tokens, which a later start reads instead of compiling.

torch.compile keeps its code on disk, too, but behind a trace of the layer, which takes a quarter of a second for each
size of the decode graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from server.engine.runtime.compile.ahead import compile_ahead, kept_function, kept_path, own_tensors
from server.engine.runtime.compile.compiled_layer import CompiledLayer, Signature
from server.engine.runtime.compile.signatures import signature_of, structure_of
from server.engine.runtime.trials import summary

logger = logging.getLogger(__name__)

_Function = Callable[..., Any]


class KeptLayers:
    """The functions of a model's layers by kind, the sizes of a call's tensors and whatever else their code depends on."""

    def __init__(self) -> None:
        self._structures: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        self._functions: dict[object, _Function] = {}
        self._works = True

    def forward(self, layer: nn.Module, otherwise: _Function, passes: object) -> _Function:
        """A forward for the layer. It is chosen at its first call; all its calls must have tensors of that call's sizes.

        otherwise takes the place of a function that cannot be compiled ahead of its calls. passes: what the code depends
        on beside the layer and its tensors, with a repr() that says all of it.
        """
        chosen: _Function | None = None

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal chosen
            if chosen is not None:
                return chosen(*args, **kwargs)
            kind, compiled = self._choose(layer, args, kwargs, passes)
            try:
                output = (compiled or otherwise)(*args, **kwargs)
            except Exception:
                # Another start must not find what does not run. Here nothing else is tried: other ranks may wait in it.
                if compiled is not None:
                    kept_path(layer, kind).unlink(missing_ok=True)
                raise
            chosen = compiled or otherwise
            return output

        return forward

    def _choose(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], passes: object
    ) -> tuple[object, CompiledLayer | None]:
        """The layer's kind and compiled function for such arguments; None where it is left to torch.compile."""
        if not self._works:
            return None, None
        # What is compiled is the layer's own forward, not the one that chooses.
        choosing = layer.forward
        del layer.forward
        try:
            # Strides are part of what the code is compiled for, so no tensor is copied to be contiguous.
            signature = replace(signature_of(args, kwargs), strided=())
            kind, function = self._function(layer, signature, signature.pick(args, kwargs), passes)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as e:
            # Calls with other arguments than tensors and constants, for example. The model's other layers may have them,
            # too, and each attempt may have taken seconds.
            self._works = False
            logger.info("graphs' layers are traced at every start: %s: %s", type(layer).__name__, summary(e))
            return None, None
        finally:
            layer.forward = choosing
        return kind, CompiledLayer(function, function, signature, own_tensors(layer))

    def _function(
        self, layer: nn.Module, signature: Signature, tensors: list[torch.Tensor], passes: object
    ) -> tuple[object, _Function]:
        if layer not in self._structures:
            self._structures[layer] = structure_of(layer)
        kind = self._structures[layer], signature, tuple(tensor.stride() for tensor in tensors), passes
        if kind not in self._functions:
            self._functions[kind] = kept_function(layer, kind, lambda: compile_ahead(layer, signature, tensors))
        return kind, self._functions[kind]
