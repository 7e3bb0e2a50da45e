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

from server.checkpoint.base import Progress
from server.engine.runtime.compile.ahead import compile_ahead, device_of, kept_function, own_tensors
from server.engine.runtime.compile.compiled_layer import CompiledLayer, Signature
from server.engine.runtime.compile.pdl import dependent_launches
from server.engine.runtime.compile.sharing import WatchedMapping
from server.engine.runtime.compile.signatures import CompileError, signature_of, structure_of
from server.engine.runtime.model.projections import NF4Linear

logger = logging.getLogger(__name__)

# Inductor chooses block sizes on CUDA as if there were so many tokens. No other size is likely to be equal.
_EXAMPLE_TOKENS = 2039


def compile_layers(layers: list[nn.Module], run: Callable[[int], object], progress: Progress) -> Callable[[], None]:
    """Replace the layers' forward by compiled functions; returns what undoes it. run(n) runs the model on n tokens.

    Raises CompileError, with the layers as they were, when that cannot be done. Call in inference mode.
    """
    if not layers:
        raise CompileError("the model's class does not show its layers")
    signatures = _observe(layers, run)
    functions: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}
    kinds = [(structure_of(layer), signature) for layer, signature in zip(layers, signatures, strict=True)]
    for done, kind in enumerate(dict.fromkeys(kinds)):
        progress("compiling layers", done / len(set(kinds)))
        layer = layers[kinds.index(kind)]
        try:
            many = _kept(layer, kind, "many")
            if device_of(layer).type == "cpu":
                with torch._inductor.config.patch({"cpp.threads": 1}):
                    functions[kind] = _kept(layer, kind, "few"), many
            else:
                functions[kind] = many, many
        except Exception as e:
            reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
            raise CompileError(f"{type(layer).__name__}: {reason}") from e
    for layer, kind in zip(layers, kinds, strict=True):
        layer.forward = CompiledLayer(*functions[kind], kind[1], own_tensors(layer))

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
            seen[index] = signature_of(args, kwargs)

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


def _kept(layer: nn.Module, kind: tuple[Any, Signature], size: str) -> Callable[..., Any]:
    """The function that an earlier start has kept, else a new one of _compile(), which is kept."""
    return kept_function(layer, (kind, size), lambda: _compile(layer, kind[1]))


def _compile(layer: nn.Module, signature: Signature) -> Any:
    """compile_ahead() for any number of tokens."""
    device = device_of(layer)
    tokens = 4 if device.type == "cpu" else _EXAMPLE_TOKENS
    examples = [
        torch.zeros([tokens if size < 0 else size for size in shape], dtype=dtype, device=device)
        for shape, dtype in zip(signature.shapes, signature.dtypes, strict=True)
    ]
    for example, shape in zip(examples, signature.shapes, strict=True):
        for dimension, size in enumerate(shape):
            if size < 0:
                torch._dynamo.decorators.mark_unbacked(example, dimension, strict=True)
    with (
        # The first run would decide between block sizes, and it has few tokens.
        torch._inductor.config.patch({"triton.autotune_pointwise": False}),
        NF4Linear.for_any_tokens(),
        dependent_launches(),
    ):
        return compile_ahead(layer, signature, examples)
