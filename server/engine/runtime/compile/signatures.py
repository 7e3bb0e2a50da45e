"""How a model calls a decoder layer, and what decides what the layer computes: together they name its compiled code."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from server.engine.runtime.compile.compiled_layer import Path, Signature
from server.engine.runtime.compile.sharing import WatchedMapping


class CompileError(Exception):
    """The layers cannot be compiled; the model runs as it is. The message is one line."""


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """The signature of a call with these arguments, with the sizes as they are. Raises CompileError."""
    leaves = [
        *(leaf for i, value in enumerate(args) for leaf in _leaves((i,), value)),
        *(leaf for name, value in kwargs.items() for leaf in _leaves((name,), value)),
    ]
    tensors = [(path, value) for path, value in leaves if isinstance(value, torch.Tensor)]
    constants = tuple((path, value) for path, value in leaves if not isinstance(value, torch.Tensor))
    for path, value in constants:
        if not isinstance(value, int | float | str | None):
            raise CompileError(f"argument {path[0]} is of type {type(value).__name__}")
    shapes = tuple(tuple(value.shape) for _, value in tensors)
    dtypes = tuple(value.dtype for _, value in tensors)
    shared = [value.entries(name) for name, value in kwargs.items() if isinstance(value, WatchedMapping)]
    if len(shared) > 1:
        raise CompileError(f"arguments {shared[0].argument} and {shared[1].argument} are mappings")
    strided = tuple(index for index, (_, value) in enumerate(tensors) if not value.is_contiguous())
    paths = tuple(path for path, _ in tensors)
    return Signature(paths, constants, shapes, dtypes, strided, shared[0] if shared else None)


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """The argument itself; of a tuple its items; of a mapping the items that the layer has read."""
    if isinstance(value, WatchedMapping):
        yield from (((*path, key, i), item) for key, entry in value.read.items() for i, item in enumerate(entry))
    elif isinstance(value, tuple):
        yield from (((*path, i), item) for i, item in enumerate(value))
    else:
        yield path, value


def arguments_of(signature: Signature, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments, put together again."""
    whole: dict[int | str, Any] = {}
    parts: dict[int | str, dict[int | str, Any]] = {}
    entries: dict[int | str, tuple[Any, ...]] = {}
    for path, value in (*zip(signature.tensors, tensors, strict=True), *signature.constants):
        if len(path) == 1:
            whole[path[0]] = value
        elif len(path) == 2:
            parts.setdefault(path[0], {})[path[1]] = value
        else:
            entries[path[1]] = (*entries.get(path[1], ()), value)
    if signature.shared is not None:
        whole[signature.shared.argument] = entries
    for key, items in parts.items():
        whole[key] = tuple(items[i] for i in range(len(items)))
    args = tuple(whole[i] for i in range(sum(isinstance(key, int) for key in whole)))
    return args, {key: value for key, value in whole.items() if isinstance(key, str)}


_FUNCTIONS = FunctionType, BuiltinFunctionType
_PLAIN = int, float, str, tuple, list, NoneType, torch.dtype, Enum, *_FUNCTIONS


def _name_of(value: object) -> str:
    """What is the same in every process, and another for another value of a module's attribute."""
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, _FUNCTIONS) else repr(value)


def structure_of(layer: nn.Module) -> Any:
    """Everything that decides what a layer computes, except for its tensors' values and its number."""
    modules = []
    for name, module in layer.named_modules():
        plain = tuple(
            (key, _name_of(value))
            for key, value in sorted(vars(module).items())
            if key not in ("layer_idx", "_index_in_model", "forward") and isinstance(value, _PLAIN)
        )
        modules.append((name, type(module), plain))
    tensors = tuple((name, tuple(t.shape), t.stride(), t.dtype) for name, t in named_tensors(layer).items())
    return tuple(modules), tensors


def configurations_of(layer: nn.Module) -> list[str]:
    """What the layer's modules may read of the model's configuration; the same for all layers of one model."""
    configs = (getattr(module, "config", None) for module in layer.modules())
    return sorted({_settings(config) for config in configs if isinstance(config, PretrainedConfig)})


def _settings(config: PretrainedConfig) -> str:
    """All of a configuration but for the folder that it was read from."""
    return repr(sorted(((key, value) for key, value in config.to_dict().items() if key != "_name_or_path"), key=str))


def named_tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach() for name, t in (*layer.named_parameters(), *layer.named_buffers())}
