"""Decoder layers as compiled functions: one compilation for all layers that are alike, for any batch.

transformers' layers spend more time in Python and in small operations than in their GEMMs. torch.compile fuses the small
operations. Calling the compiled function directly, without its guards and without nn.Module.__call__, saves as much
again. What the guards would have checked is fixed here: which arguments a layer gets, their types, and which sizes vary
(the number of tokens).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import PretrainedConfig

from server.checkpoint.base import Progress
from server.engine.runtime.compile.artifacts import artifact_path, load_artifact, store_artifact
from server.engine.runtime.compile.compiled_layer import CompiledLayer, Path, Signature
from server.engine.runtime.compile.pdl import dependent_launches
from server.engine.runtime.compile.sharing import WatchedMapping
from server.engine.runtime.model.projections import NF4Linear

logger = logging.getLogger(__name__)

# Inductor chooses block sizes on CUDA as if there were so many tokens. No other size is likely to be equal.
_EXAMPLE_TOKENS = 2039


class CompileError(Exception):
    """The layers cannot be compiled; the model runs as it is. The message is one line."""


def compile_layers(layers: list[nn.Module], run: Callable[[int], object], progress: Progress) -> Callable[[], None]:
    """Replace the layers' forward by compiled functions; returns what undoes it. run(n) runs the model on n tokens.

    Raises CompileError, with the layers as they were, when that cannot be done. Call in inference mode.
    """
    if not layers:
        raise CompileError("the model's class does not show its layers")
    signatures = _observe(layers, run)
    functions: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}
    kinds = [(_structure(layer), signature) for layer, signature in zip(layers, signatures, strict=True)]
    for done, kind in enumerate(dict.fromkeys(kinds)):
        progress("compiling layers", done / len(set(kinds)))
        layer = layers[kinds.index(kind)]
        try:
            if _device(layer).type == "cpu":
                many = _kept(layer, kind, "many")
                with torch._inductor.config.patch({"cpp.threads": 1}):
                    functions[kind] = _kept(layer, kind, "few"), many
            else:
                many = _compile(layer, kind[1])[0]
                functions[kind] = many, many
        except Exception as e:
            reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
            raise CompileError(f"{type(layer).__name__}: {reason}") from e
    for layer, kind in zip(layers, kinds, strict=True):
        layer.forward = CompiledLayer(*functions[kind], kind[1], _tensors(layer))

    def undo() -> None:
        for layer in layers:
            del layer.forward

    return undo


def _observe(layers: list[nn.Module], run: Callable[[int], object]) -> list[Signature]:
    """Each layer's signature, with -1 for the sizes that differ between runs of 3 and of 5 tokens."""
    with _recorded(layers) as short:
        run(3)
    with _recorded(layers) as long:
        run(5)
    if set(short) != set(long) or len(short) != len(layers):
        raise CompileError("not every layer is called once for every batch")
    signatures = []
    for index in range(len(layers)):
        a, b = short[index], long[index]
        if replace(a, shapes=()) != replace(b, shapes=()):
            raise CompileError("layers are called in different ways for different batches")
        shapes = tuple(
            tuple(-1 if m != n else m for m, n in zip(x, y, strict=True))
            for x, y in zip(a.shapes, b.shapes, strict=True)
        )
        signatures.append(replace(a, shapes=shapes))
    return signatures


@contextmanager
def _recorded(layers: list[nn.Module]) -> Iterator[dict[int, Signature]]:
    """Signatures by layer of the calls made while entered, with the sizes as they are."""
    seen: dict[int, Signature] = {}

    def watch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {k: WatchedMapping(v) if isinstance(v, MutableMapping) else v for k, v in kwargs.items()}

    def hook_for(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
            seen[index] = _signature(args, kwargs)

        return hook

    handles = [
        handle
        for index, layer in enumerate(layers)
        for handle in (
            layer.register_forward_pre_hook(watch, with_kwargs=True),
            layer.register_forward_hook(hook_for(index), with_kwargs=True),
        )
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
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


def _arguments(signature: Signature, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def _structure(layer: nn.Module) -> Any:
    """Everything that decides what a layer computes, except for its tensors' values and its number."""
    modules = []
    for name, module in layer.named_modules():
        plain = tuple(
            (key, repr(value))
            for key, value in sorted(vars(module).items())
            if key not in ("layer_idx", "_index_in_model")
            and isinstance(value, int | float | str | tuple | list | None)
        )
        modules.append((name, type(module), plain))
    tensors = tuple((name, tuple(t.shape), t.stride(), t.dtype) for name, t in _named_tensors(layer).items())
    return tuple(modules), tensors


def _configurations(layer: nn.Module) -> list[str]:
    """What the layer's modules may read of the model's configuration; the same for all layers of one model."""
    found = (getattr(module, "config", None) for module in layer.modules())
    return sorted(
        {repr(sorted(config.to_dict().items(), key=str)) for config in found if isinstance(config, PretrainedConfig)}
    )


def _named_tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach() for name, t in (*layer.named_parameters(), *layer.named_buffers())}


def _device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device


def _tensors(layer: nn.Module) -> list[torch.Tensor]:
    return list(_named_tensors(layer).values())


def _kept(layer: nn.Module, kind: tuple[Any, Signature], size: str) -> Callable[..., Any]:
    """The function that an earlier start has kept, else a new one of _compile(), which is kept."""
    path = artifact_path(kind, _configurations(layer), size)
    function = load_artifact(path, layer)
    if function is None:
        function, ahead = _compile(layer, kind[1])
        store_artifact(path, ahead, layer)
    return function


def _compile(layer: nn.Module, signature: Signature) -> tuple[Callable[..., Any], Any]:
    """A function of (the signature's tensors..., the layer's tensors...) without guards; what torch stores of it."""
    names = list(_named_tensors(layer))
    count = len(signature.tensors)

    def call(*tensors: torch.Tensor) -> Any:
        args, kwargs = _arguments(signature, tensors[:count])
        output = functional_call(layer, dict(zip(names, tensors[count:], strict=True)), args, kwargs)
        shared = signature.shared
        return output if shared is None else (output, shared.outputs(kwargs[shared.argument]))

    device = _device(layer)
    tokens = 4 if device.type == "cpu" else _EXAMPLE_TOKENS
    examples = [
        torch.zeros([tokens if size < 0 else size for size in shape], dtype=dtype, device=device)
        for shape, dtype in zip(signature.shapes, signature.dtypes, strict=True)
    ]
    for example, shape in zip(examples, signature.shapes, strict=True):
        for dimension, size in enumerate(shape):
            if size < 0:
                torch._dynamo.decorators.mark_unbacked(example, dimension, strict=True)
    # Ahead-of-time compilation is off by default before torch 2.13, and cannot start over with floats as tensors.
    with (
        torch._dynamo.config.patch(enable_aot_compile=True, specialize_float=True),
        # The first run would decide between block sizes, and it has few tokens.
        torch._inductor.config.patch({"triton.autotune_pointwise": False}),
        NF4Linear.for_any_tokens(),
        dependent_launches(),
    ):
        compiled: Any = torch.compile(call, fullgraph=True)
        ahead = compiled.aot_compile(((*examples, *_tensors(layer)), {}))
    ahead.disable_guard_check()
    return ahead.fn, ahead
